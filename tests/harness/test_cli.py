"""The command line as a user has it: in processes of its own, with signals, from any folder."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness import __main__ as entry
from tests.support.cli import ROOT, SECRET, Cli, points
from tests.support.fake_engine import behave, recorded, wait_until


def test_failing_points_leave_rows_and_the_status_says_so(cli: Cli) -> None:
    from harness.store import load

    behave(cli.folder, p2="raise", p5="SIGKILL")
    status, last, err = cli.run()

    assert status == 1
    assert last == {
        "run": last["run"],
        "points": 8,
        "ok": 6,
        "skipped": 0,
        "contaminated": 0,
        "error": 1,
        "killed": 1,
        "oom": 0,
        "timeout": 0,
        "pending": 0,
    }
    rows = load(last["run"]).points.sort_values("index").set_index("index")
    assert list(rows["status"]) == ["ok", "ok", "error", "ok", "ok", "killed", "ok", "ok"]
    assert rows.loc[2, "reason"] == "RuntimeError: the fake engine was told to fail"
    assert "in act" in rows.loc[2, "traceback"]
    assert rows.loc[5, "reason"] == "the engine's process was ended by SIGKILL"
    assert "last words of the engine" in rows.loc[5, "traceback"]
    folder = Path(last["run"]) / "points" / rows.loc[2, "point_id"]
    assert (folder / "traceback.txt").read_text() == rows.loc[2, "traceback"]
    assert len(recorded("starts", cli.folder)) == 4, "two engines, and one more after each failure"
    assert "[8/8]" in err
    assert wait_until(lambda: not cli.living(), 60)
    for path in Path(last["run"]).rglob("*"):
        assert path.is_dir() or SECRET.encode() not in path.read_bytes(), path


def test_after_sigkill_nothing_is_left_and_the_same_command_continues(cli: Cli) -> None:
    behave(cli.folder, p4="hang")
    with cli.start() as process:
        cli.wait_for_point(4)
        assert len(cli.living()) == 2, "an engine and its rank"
        process.kill()
        process.communicate()
    assert wait_until(lambda: not cli.living(), 60)

    (run,) = cli.results.iterdir()
    before = points(str(run))
    assert sorted(before) == [0, 1, 2, 3]
    behave(cli.folder)
    status, last, err = cli.run()

    assert status == 0
    assert (last["run"], last["ok"], last["pending"]) == (str(run), 8, 0)
    assert "continuing run" in err
    assert "4 of 8 points are there" in err
    assert cli.measured() == [0, 1, 2, 3, 4, 4, 5, 6, 7]
    after = points(str(run))
    assert {index: after[index] for index in before} == before
    assert [p.name for p in cli.results.iterdir()] == [run.name]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_in_order(cli: Cli, number: signal.Signals) -> None:
    behave(cli.folder, p1="hang")
    with cli.start() as process:
        cli.wait_for_point(1)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)

    assert process.returncode == 130
    last = json.loads(out.splitlines()[-1])
    assert (last["ok"], last["pending"]) == (1, 7)
    assert "interrupted; the same command continues this run" in err
    assert "Traceback" not in err
    assert wait_until(lambda: not cli.living(), 60)


def test_further_interrupts_do_not_break_off_the_end(cli: Cli) -> None:
    behave(cli.folder, p1="hang")
    with cli.start() as process:
        cli.wait_for_point(1)
        while process.poll() is None:
            process.send_signal(signal.SIGINT)
            time.sleep(0.01)
        out, err = process.communicate(timeout=60)

    assert process.returncode == 130
    last = json.loads(out.splitlines()[-1])
    assert (last["ok"], last["pending"]) == (1, 7)
    assert err.count("interrupted; the same command continues this run") == 1
    assert "Traceback" not in err
    assert wait_until(lambda: not cli.living(), 60)


def test_where_files_cannot_grow_the_finished_points_are_printed(cli: Cli) -> None:
    """A limit on the size of files stands for a full disk: tables are above it, plan.json not."""
    two = ("tp=1", "batch=1,2")
    behave(cli.folder, p1="SIGKILL")
    first = cli.run(*two)[1]
    assert (first["ok"], first["killed"]) == (1, 1)
    behave(cli.folder)

    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192)); "
    with cli.start(*two, f"resume={first['run']}", before=limit) as process:
        out, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert json.loads(out.splitlines()[-1]) == first
    rows = [line.split()[:3] for line in out.splitlines() if line.startswith(("ok", "killed"))]
    assert rows == [["ok", "1", "1"], ["killed", "1", "2"]]
    assert "cannot be written" in err and "Traceback" not in err

    status, last, _ = cli.run(*two)
    assert (status, last["run"], last["ok"]) == (0, first["run"], 2)


def test_help_is_light_and_names_everything() -> None:
    code = (
        "import sys; from harness.__main__ import main; status = main(['--help']); "
        "heavy = {'torch', 'pandas', 'pyarrow', 'hydra', 'engine', 'rich'} & set(sys.modules); "
        "sys.exit(status or str(heavy) if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    for word in (
        "list",
        "collect",
        "doctor",
        "tp_sweep",
        "enforce_eager",
        "qwen3-32b",
        "nano_vllm",
    ):
        assert word in done.stdout


def test_help_shows_ones_own_experiments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\n# python -m harness +experiment=mine\n# Is it\n# faster?\ntp: 2\n"
    )
    assert entry.main(["--help", "--config-dir", str(tmp_path)]) == 0
    assert re.search(r"^  mine +Is it faster\?$", capsys.readouterr().out, re.MULTILINE)


def test_hydra_answers_its_own_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main(["--cfg", "job", "+experiment=tp_sweep"]) == 0
    assert "enforce_eager: true" in capsys.readouterr().out


def test_an_unknown_command_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main(["sweep", "tp=1"]) == 2
    assert capsys.readouterr().err == (
        "sweep: no such command; choose one of run, list, profile, collect, compare, calibrate, "
        "predict, doctor, or see python -m harness --help\n"
    )


def test_doctor_takes_no_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main(["doctor", "--json"]) == 2
    assert capsys.readouterr() == ("", "doctor: --json: it takes no arguments\n")


def test_list_prints_the_points_and_leaves_nothing(
    cli: Cli, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    somewhere = tmp_path / "somewhere"
    somewhere.mkdir()
    monkeypatch.chdir(somewhere)
    assert entry.main(["list", *cli.arguments, "enforce_eager=false", "device=cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("adhoc: backend=native, enforce_eager=false, compile=off")
    assert lines[1].split() == ["#", "point", "engine", "tp", "batch", "skipped", "because"]
    rows = [line.split() for line in lines[2:-1]]
    assert [row[0] for row in rows] == [str(i) for i in range(8)]
    assert [(row[3], row[4]) for row in rows] == [(t, b) for t in "12" for b in "1248"]
    assert all("CUDA graphs need a CUDA device" in line for line in lines[2:-1])
    assert lines[-1] == "8 points, 8 skipped, 0 engine starts"
    assert list(somewhere.iterdir()) == []
    assert not cli.results.exists()


@pytest.mark.parametrize("words", [["tp=3"], ["batch=1,x"], ["workload.output_tokens=99999"]])
def test_a_wrong_setting_leaves_no_run(
    cli: Cli, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert entry.main([*cli.arguments, *words]) == 1
    assert capsys.readouterr().err.startswith("error: ")
    assert not cli.results.exists()


@pytest.mark.parametrize("verb", ["run", "list"])
def test_a_trace_that_cannot_be_read_leaves_no_run(
    cli: Cli, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = cli.folder / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-01-01,1,2\n2024-01-01,1_0,2\n")
    words = ["workload=trace", f"workload.trace={trace}", "workload.num_requests=2"]
    assert entry.main([verb, *cli.arguments, *words]) == 1
    error = f"error: {trace}, line 3: '1_0' is no number of tokens\n"
    assert capsys.readouterr().err == error
    assert not cli.results.exists()


def test_a_run_of_another_plan_is_not_resumed(cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main([*cli.arguments, "resume=no-such-run"]) == 1
    assert "resume=no-such-run: no such run" in capsys.readouterr().err


def test_results_in_a_file_are_a_wrong_setting(
    cli: Cli, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.results.touch()
    assert entry.main(cli.arguments) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"error: results_dir={cli.results}: no run can be kept there (File exis")
    assert err.count("\n") == 1


def test_a_reader_that_leaves_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with subprocess.Popen(
        [sys.executable, "-m", "harness", "--help"], cwd=ROOT, stdout=writer, stderr=subprocess.PIPE
    ) as process:
        os.close(writer)
        assert process.stderr and process.stderr.read() == b""
    assert process.returncode == 128 + signal.SIGPIPE
