"""`python -m harness profile`: a run under an nsys of the test, and what is left beside it."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from harness import __main__ as entry
from harness.machine.capabilities import Machine
from harness.nsys.verb import SWITCH, profile_point
from harness.planning.device_lock import held
from harness.settings.launcher import run
from harness.store import Results, load
from tests.support import nsys_target
from tests.support.nsys_export import Export, session

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = (sys.executable, "-m", "tests.support.nsys_target")
Profile = Callable[..., int]


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Profile:
    """`python -m harness profile ARGUMENTS` on two imaginary GPUs, with an nsys in $NSYS."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(Machine, "probe", classmethod(lambda cls: nsys_target.GPUS))
    monkeypatch.setenv("NSYS", str(nsys_target.write_nsys(tmp_path)))
    model = nsys_target.write_model(tmp_path / "model")
    fixed = [*nsys_target.SETTINGS, f"model.path={model}", f"results_dir={tmp_path / 'runs'}"]

    def call(*arguments: str) -> int:
        words = [*fixed, *arguments, SWITCH]
        handler = partial(profile_point, words=words, program=PROGRAM)
        return run(words, entry.conf_folder(), handler)

    return call


def test_a_profiled_point(
    profile: Profile, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The run's own tables, and beside them kernels joined to the collectives of the same steps."""
    nsys_target.export().write(tmp_path / "export.sqlite", shuffled=0)
    assert profile() == 0
    out, _ = capfd.readouterr()
    last = json.loads(out.splitlines()[-1])
    results = load(last["run"])
    (point,) = results.points["point_id"].unique()
    folder = Path(last["run"]) / "points" / f"{point}-nsys"
    assert sorted(p.name for p in folder.iterdir()) == [
        "collectives.parquet", "kernels.parquet", "metrics.parquet", "ranges.parquet",
        "report.nsys-rep", "report.sqlite",
    ]  # fmt: skip
    assert (last["report"], last["sqlite"]) == (
        str(folder / "report.nsys-rep"), str(folder / "report.sqlite")
    )  # fmt: skip
    assert results.points["status"].tolist() == ["ok"]
    assert "nsys was attached" in results.points["notes"][0]
    assert results.points["instrument"][0] == "collectives,nvtx,counts,nsys"
    check_collectives(results)
    check_figures(results)
    assert len(results.kernels) == 2 * 5 * 7 * 2 and set(results.kernels["pass"]) == {"nsys"}
    assert set(results.ranges["domain"]) == {"engine"} and len(results.ranges) == 2 * (5 + 7)

    commands = [line.split("\t") for line in (tmp_path / "commands").read_text().splitlines()]
    assert [command[0] for command in commands] == ["--version", "profile", "export"]
    words = commands[1]
    assert words[-1] == f'resume="{last["run"]}"' and SWITCH in words and "run" in words
    assert f"--output={folder / 'report'}" in words
    assert words[-2] == "device_lock=off", "the process that waits for nsys holds the lock"
    # Replays have the bytes and sites of the graph; 4 of them, and a kernel's time by rank.
    assert re.search(r"replay +all_reduce +embed +128 +4 +9.0 / 8.0 +8.0 +1.0 / 0.0", out)
    assert re.search(r"launched +all_reduce +embed +256 +1 +9.0 / 79.0 +9.0 +0.0 / 70.0", out)
    assert re.search(r"all_reduce +embed +128 +2.0 +21.0 / 2.0", out)
    assert entry.main(["collect", last["run"]]) == 0
    read_again(folder / "report.sqlite", capfd)


def check_collectives(results: Results) -> None:
    rows = results.collectives
    rows = rows[rows["pass"] == "nsys"]
    stamped = results.collectives[results.collectives["pass"] == "graph_timed"]
    assert len(rows) == 2 * 5 * 7 and set(rows["source"]) == {"nsys"}
    steps = results.steps[results.steps["pass"] == "nsys"]
    assert sorted(set(rows["step"])) == sorted(set(steps["step"]))
    assert set(rows["phase"]) == {"prefill", "decode"} and set(rows["path"]) == {"nccl"}
    assert rows["latency_us"].isna().all()
    replays = rows[rows["mode"] == "graph"]
    # Ordinal by ordinal what the pass with stamps heard while its graph was captured.
    step = replays["step"].min()
    one = replays[(replays["step"] == step) & (replays["rank"] == 0)]
    other = stamped[(stamped["mode"] == "graph") & (stamped["rank"] == 0)].head(7)
    for column in ("ordinal", "kind", "site", "layer", "bytes", "expected_bytes", "dtype"):
        assert one[column].tolist() == other[column].tolist(), column
    reduces = replays[replays["kind"] == "all_reduce"]
    assert reduces.groupby("rank")["kernel_us"].agg(set).to_dict() == {0: {9.0}, 1: {8.0}}
    assert set(reduces["transfer_us"]) == {8.0}
    assert reduces.groupby("rank")["wait_us"].agg(set).to_dict() == {0: {1.0}, 1: {0.0}}
    prefill = rows[(rows["phase"] == "prefill") & (rows["kind"] == "all_reduce")]
    assert set(prefill["bytes"]) == {256} and set(prefill["transfer_us"]) == {9.0}
    assert prefill.groupby("rank")["wait_us"].agg(set).to_dict() == {0: {0.0}, 1: {70.0}}
    gathers = rows[rows["kind"] == "gather"]
    assert gathers["transfer_us"].isna().all() and set(gathers["transfer_reason"]) == {"rooted"}


def check_figures(results: Results) -> None:
    figures = results.metrics[results.metrics["pass"] == "nsys"]
    assert set(figures["source"]) == {"nsys"}
    kernel = figures[(figures["name"] == "kernel_us") & (figures["stat"] == "p50")]
    kernel = kernel[(kernel["site"] == "attn.o_proj") & (kernel["phase"] == "decode")]
    assert kernel.set_index("ranks")["value"].to_dict() == {"min": 8.0, "max": 9.0}
    # Stamps read 10 us on rank 1 and 30 us on rank 0.
    stamps = figures[(figures["name"] == "stamp_vs_cupti_us") & (figures["site"] == "embed")]
    assert stamps.set_index("ranks")["value"].to_dict() == {"0": 21.0, "1": 2.0, "min": 2.0}
    gap = figures[(figures["name"] == "launch_gap_us") & (figures["stat"] == "p50")]
    # 1 us before each of 7 collectives, and 18 us to the next gemm less the collective before it.
    decode = gap[gap["phase"] == "decode"].set_index("ranks")["value"].to_dict()
    assert decode == {"min": 7 + 6 * 9.0, "max": 7 + 6 * 10.0}
    assert gap[gap["phase"] == "mixed"]["reason"].tolist() == ["no such step in the window"] * 2


def read_again(kept: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Where a join fails, the export is there, and can be read again beside its run, or alone."""
    (kept.parent / "kernels.parquet").unlink()
    session(Export(), nsys_target.steps()[:-1], nsys_target.kernel_ns).write(kept)
    assert entry.main(["profile", "--read", str(kept)]) == 1
    err = capfd.readouterr().err
    assert err == (
        "error: rank 0: 4 step ranges in the export, 5 steps in the run's table (pass nsys)\n"
    )
    assert not (kept.parent / "kernels.parquet").exists()

    nsys_target.export().write(kept)
    assert entry.main(["profile", "--read", str(kept)]) == 0
    assert len(load(kept.parents[2]).kernels) == 140
    assert "stamps less kernels" in capfd.readouterr().out

    alone = kept.rename(kept.parents[3] / "alone.sqlite")
    assert entry.main(["profile", str(alone), "--read"]) == 0
    out = capfd.readouterr().out
    assert re.search(r"replay +all_reduce +attn.o_proj +\(batch 2\) +8 +9.0 / 8.0 +8.0", out)
    assert "stamps" not in out


def test_one_point_is_asked_for(profile: Profile, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, said in (
        (["batch=1,2", "compile=off,model"], "this gives 4; they differ in batch=1,2; "
         "compile=off,model. Give one value of each, as in batch=1 compile=off"),
        (["workload.output_tokens=3,4"], "they differ in workload.output_tokens=3,4. Give one"),
        (["tp=4"], "the point cannot run here: needs 4 GPUs, 2 visible"),
        (["device=cpu", "enforce_eager=true"], "device=cpu: nsys times a GPU's kernels"),
        (["measure.n_process=2"], "measure.n_process=2: a profile is of one engine"),
        (["instrument.collectives=false"], "instrument.collectives=false: a profile takes"),
        (["instrument.profiler=true"], "instrument.profiler=true: torch.profiler and nsys cannot"),
        (["resume=some-run"], "resume=some-run: a profile is a run of its own; leave it out"),
    ):  # fmt: skip
        assert profile(*arguments) == 1, arguments
        assert said in capsys.readouterr().err, arguments


def test_a_profile_does_not_time_beside_another_run(
    profile: Profile, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("harness.planning.device_lock._uuids", lambda: ["GPU-a", "GPU-b"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with held(["GPU-b"], "wait", "another run", print):
        assert profile("device_lock=refuse") == 1
    assert "(another run) is timing on GPU-b of this machine" in capsys.readouterr().err
    commands = (tmp_path / "commands").read_text().splitlines()
    assert [command.split("\t")[0] for command in commands] == ["--version"]


def test_without_an_nsys_it_says_how_to_get_one_and_what_it_would_have_run(
    profile: Profile, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("NSYS", str(tmp_path / "none"))
    assert profile() == 1
    err = capsys.readouterr().err
    assert "none: no such program" in err and "It would have run:\nnsys profile --trace=cuda" in err
    assert "--cuda-graph-trace=node" in err and "tp=2 batch=2" in err and SWITCH in err

    monkeypatch.setenv("NSYS", str(nsys_target.write_nsys(tmp_path, version="2023.4.4.54")))
    assert profile() == 1
    assert "nsys 2023.4.4.54 records no range of nvtx" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_an_nsys_that_fails(
    profile: Profile, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    nsys = tmp_path / "nsys"
    nsys.write_text("#!/bin/sh\n[ $1 = --version ] && echo version 2025.3.2 || exit 3\n")
    assert profile() == 1
    assert "error: the point did not end; what there is of it is in" in capfd.readouterr().err


@pytest.mark.parametrize("arguments", [["--read"], ["--read", "a", "b"], ["--read", "--csv"]])
def test_read_takes_one_file(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main(["profile", *arguments]) == 2
    assert "profile --read: name one export" in capsys.readouterr().err


def test_read_of_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main(["profile", "--read", "/gone.sqlite"]) == 1
    assert capsys.readouterr().err == "error: /gone.sqlite: no such file\n"
