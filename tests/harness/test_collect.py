"""`collect` as a user has it: what it prints of a run, whole, damaged or without a row."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness import __main__ as entry
from tests.support.cli import ROOT, Cli


def test_collect_needs_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main(["collect"]) == 2
    assert "name a run folder, or several" in capsys.readouterr().err
    assert entry.main(["collect", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"collect: {tmp_path} is no run folder (it has no plan.json)\n"
    )
    for age, name in enumerate("dacb"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "plan.json").write_text("{}")
        os.utime(tmp_path / name / "plan.json", (1000 - age, 1000 - age))
    assert entry.main(["collect", str(tmp_path)]) == 2
    newest = ", ".join(str(tmp_path / name) for name in "dac")
    assert capsys.readouterr().err.endswith(f"name one of its runs, the newest: {newest}\n")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--csv", "--json"], "--csv and --json: one at a time"),
        (["--cvs"], "--cvs: no such flag"),
    ],
)
def test_collect_says_which_flag_it_does_not_take(
    flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert entry.main(["collect", "RUN", *flags]) == 2
    forms = "--markdown, --csv, --json, --repeats or none of them"
    assert capsys.readouterr() == ("", f"collect: {told}; give {forms}\n")


def test_collect_of_a_run_without_a_row_prints_a_sentence_and_no_table(
    cli: Cli, capsys: pytest.CaptureFixture[str]
) -> None:
    _, last, _ = cli.run()
    for folder in (Path(last["run"]) / "points").iterdir():
        shutil.rmtree(folder)
    for flags in ([], ["--markdown"]):
        assert entry.main(["collect", last["run"], *flags]) == 0
        said = capsys.readouterr().out
        assert said == "no point has ended yet, so there is no table\n"


def test_collect_names_a_damaged_table(cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    _, last, _ = cli.run("batch=1", "tp=1")
    (table,) = Path(last["run"]).glob("points/*/metrics.parquet")
    whole = table.read_bytes()
    for damaged in (b"", b"PAR1", whole[:-100], whole[:4] + bytes(len(whole) - 8) + whole[-4:]):
        table.write_bytes(damaged)
        for flags in ([], ["--csv"], ["--markdown"]):
            capsys.readouterr()
            assert entry.main(["collect", last["run"], *flags]) == 1
            out, err = capsys.readouterr()
            assert out == "" and err.count("\n") == 1
            assert err.startswith(f"error: {table} is damaged (")
            assert f"resume={last['run']} beside the settings of the run measures its" in err


def test_collect_prints_what_can_be_published(cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    _, last, _ = cli.run("batch=1", "tp=1")
    capsys.readouterr()
    assert entry.main(["collect", last["run"], "--markdown"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3].startswith("| ok | 1 | 1 | true | off | 100 |")
    assert lines[-1] == Path(last["run"]).name
    assert entry.main(["collect", "--csv", last["run"]]) == 0
    header, row = capsys.readouterr().out.splitlines()
    assert dict(zip(header.split(","), row.split(","), strict=True))["output_tok_s"] == "100.0"
    assert entry.main(["collect", last["run"], "--html"]) == 2


def test_collect_is_as_wide_in_a_pipe_as_run_is(cli: Cli) -> None:
    with cli.start("batch=1", "tp=1,2") as process:
        out, _ = process.communicate(timeout=120)
    table = out.splitlines()[:-1]
    run = json.loads(out.splitlines()[-1])["run"]
    again = subprocess.run(
        [sys.executable, "-m", "harness", "collect", run],
        capture_output=True, text=True, cwd=ROOT, timeout=60, env={**os.environ, "COLUMNS": "30"},
    )  # fmt: skip
    assert again.stdout.splitlines() == table
