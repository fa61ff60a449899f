"""Several runs in one table: each point once and by name, machines kept apart."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from harness.__main__ import main
from harness.judging.repeats import read
from harness.store import NoRunError, load, merge
from harness.tables.merged import MachinesDiffer
from harness.tables.report import summary
from tests.support.made_runs import MACHINE, write_cell

OTHER = {**MACHINE, "fingerprint": "machine-2", "cpu": "another CPU"}


def make(folder: Path, created_at: str, *cells: dict[str, Any], sources: str = "s") -> Path:
    """A run with `cells` of made_runs.write_cell."""
    folder.mkdir()
    plan = {"created_at": created_at, "surroundings": {"sources": sources, "versions": {}}}
    (folder / "plan.json").write_text(json.dumps(plan))
    for cell in cells:
        write_cell(folder, **cell)
    return folder


def cell(index: int, rate: float, **further: Any) -> dict[str, Any]:
    return {"rates": [[rate, rate]], "index": index, **further}


def fan_out(whole: Path, runs: list[Path]) -> Path:
    """The runs, each moved below a job."""
    for number, run in enumerate(runs):
        (whole / f"job-00{number}").mkdir(parents=True)
        run.rename(whole / f"job-00{number}" / run.name)
    (whole / "jobs.json").write_text("{}")
    return whole


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    return [
        make(tmp_path / "a", "2026-01-01", cell(0, 100.0, tp=1), cell(3, 50.0, tp=2, batch=4)),
        make(tmp_path / "b", "2026-01-02", cell(1, 120.0, tp=2), cell(2, 80.0, tp=1, batch=4)),
    ]


def test_the_rows_of_all_runs_in_their_order_with_ratios_between_them(runs: list[Path]) -> None:
    frame = summary(merge(runs))
    assert list(zip(frame["tp"], frame["batch"], frame["output_tok_s"], strict=True)) == [
        (1, 2, 100.0), (2, 4, 50.0), (2, 2, 120.0), (1, 4, 80.0),
    ]  # fmt: skip
    assert list(frame["scaling_efficiency"]) == [1.0, 50 / 160, 120 / 200, 1.0]
    assert list(frame.columns) == list(summary(runs[0]).columns)


def test_a_fan_out_stands_for_its_runs(tmp_path: Path, runs: list[Path]) -> None:
    other = make(tmp_path / "c", "2026-01-03", cell(4, 70.0, tp=4))
    frame = summary(merge([fan_out(tmp_path / "jobs", runs), other]))
    assert list(frame["output_tok_s"]) == [100.0, 50.0, 120.0, 80.0, 70.0]
    (tmp_path / "none").mkdir()
    with pytest.raises(NoRunError, match="no job has planned"):
        merge([fan_out(tmp_path / "none", [])])


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_point_of_two_runs_is_taken_from_the_better_one_then_from_the_newer(
    tmp_path: Path, order: tuple[int, int]
) -> None:
    a = make(tmp_path / "a", "2026-01-02", cell(0, 100.0), cell(1, 300.0),
             {"rates": [], "index": 2, "status": "error", "reason": "lost"})  # fmt: skip
    b = make(tmp_path / "b", "2026-01-01", cell(0, 200.0), cell(2, 400.0),
             {"rates": [], "index": 1, "status": "skipped", "reason": "no GPU"})  # fmt: skip
    merged = merge([(a, b)[place] for place in order])
    frame = summary(merged).sort_values("index")
    assert list(frame["status"]) == ["ok", "ok", "ok"]
    assert list(frame["output_tok_s"]) == [100.0, 300.0, 400.0]
    said = {0: "a (ok), b (ok)", 1: "a (ok), b (skipped)", 2: "a (error), b (ok)"}
    if order == (0, 1):
        assert sorted(merged.notes) == [
            f"point {index:012x} is in {text}; taken from {'aab'[index]}"
            for index, text in said.items()
        ]


def test_a_newer_run_that_was_interrupted_does_not_replace_a_whole_one(tmp_path: Path) -> None:
    whole = make(tmp_path / "whole", "2026-01-01", {"rates": [[100.0], [100.0], [100.0]]})
    part = make(tmp_path / "part", "2026-01-02", {"rates": [[300.0]]})
    assert list(summary(merge([part, whole]))["output_tok_s"]) == [100.0]


def test_machines_are_refused_unless_asked_for_and_then_told_apart(
    tmp_path: Path, runs: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    other = make(tmp_path / "c", "2026-01-03", cell(7, 90.0, tp=2, machine=OTHER))
    with pytest.raises(
        MachinesDiffer, match=r"a has a CPU \(machine-1\); c has another CPU \(mach"
    ):
        merge([*runs, other])
    assert main(["collect", *map(str, [*runs, other])]) == 2
    assert "--across-machines" in capsys.readouterr().err

    frame = summary(merge([*runs, other], across_machines=True))
    assert list(frame["machine"]) == ["machine-1"] * 4 + ["machine-2"]
    assert frame["scaling_efficiency"].iloc[2] == 120 / 200
    assert frame["scaling_reason"].iloc[4] == (
        "no point of tp=1 with these settings is ok (nearest: machine=machine-1, not machine-2)"
    )
    assert main(["collect", *map(str, [*runs, other]), "--across-machines", "--csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["machine"] for row in rows] == ["machine-1"] * 4 + ["machine-2"]
    assert [row["hardware_fingerprint"] for row in rows] == [row["machine"] for row in rows]


def test_a_failed_point_of_another_machine_has_no_figure_to_keep_apart(
    tmp_path: Path, runs: list[Path]
) -> None:
    lost = {"rates": [], "index": 9, "status": "error", "reason": "lost", "machine": OTHER}
    merge([*runs, make(tmp_path / "c", "2026-01-03", lost)])


def test_other_sources_are_said(tmp_path: Path, runs: list[Path]) -> None:
    other = make(tmp_path / "c", "2026-01-03", cell(7, 90.0), sources="changed")
    assert merge([*runs, other]).notes == [
        "the runs differ in sources; what differs between their rows may come from that"
    ]


def test_collect_takes_several_runs_and_the_folder_of_a_fan_out(
    tmp_path: Path, runs: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    whole = fan_out(tmp_path / "fan-out", runs)
    below = [str(whole / f"job-00{number}" / run.name) for number, run in enumerate(runs)]
    assert main(["collect", "--csv", *below]) == 0
    by_name = capsys.readouterr().out
    assert main(["collect", str(whole), "--csv"]) == 0
    assert capsys.readouterr().out == by_name
    assert len(by_name.splitlines()) == 5
    assert main(["collect", str(whole), "--repeats"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + 4 * 2
    assert main(["collect", str(tmp_path)]) == 2


def test_a_fan_out_is_read_as_one_run_by_itself_and_among_others(
    tmp_path: Path, runs: list[Path]
) -> None:
    """Ratios between its jobs as well."""
    results = tmp_path / "results"
    whole = fan_out(results / "fan-out", runs)
    make(results / "z", "2026-01-03", cell(0, 7.0, tp=1))
    found = load(whole)
    axes = ["tp", "batch", "output_tok_s", "scaling_efficiency"]
    rows = [[1, 2, 100.0, 1.0], [2, 4, 50.0, 50 / 160], [2, 2, 120.0, 0.6], [1, 4, 80.0, 1.0]]
    assert found.summary[axes].values.tolist() == rows
    assert len(found.points) == 4 * 2
    assert load(results).summary[axes].values.tolist() == [*rows, [1, 2, 7.0, 1.0]]
    assert len(load(results).points) == 5 * 2
    narrow = load(whole, ["points"], ["tp"])
    assert list(narrow.points) == ["tp"]
    with pytest.raises(KeyError, match="was not loaded"):
        narrow.table("steps")
    assert len(read(whole)) == 4 * 2
    (results / "none").mkdir()
    (results / "none" / "jobs.json").write_text("{}")
    with pytest.raises(NoRunError, match="no job has planned its points yet"):
        load(results / "none")
    assert len(load(results).summary) == 5


def test_sides_of_several_machines_are_not_the_same_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which of them a cell was measured on may be another on each side."""
    sides = []
    for side in "ab":
        of_both = [
            make(tmp_path / f"{side}1", "2026-01-01", cell(0, 100.0)),
            make(tmp_path / f"{side}2", "2026-01-01", cell(1, 50.0, machine=OTHER)),
        ]
        sides.append(str(fan_out(tmp_path / f"fan-out-{side}", of_both)))
    assert main(["compare", *sides]) == 2
    assert "other machines: A is" in capsys.readouterr().err
    assert main(["compare", *sides, "--across-machines"]) == 0
