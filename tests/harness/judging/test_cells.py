from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from harness.judging.cells import Comparison, Refused, compare
from harness.judging.repeats import read
from tests.support.made_runs import MACHINE, noisy, write_cell

STEADY = noisy(5, 6, between=0.005, within=0.01, seed=0)
ALIKE = noisy(5, 6, between=0.005, within=0.01, seed=2)
SLOWER = noisy(5, 6, between=0.005, within=0.01, seed=1, centre=90)


def both(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "run-a", tmp_path / "run-b"


def compared(a: Path, b: Path, **more: Any) -> Comparison:
    return compare(read(a), read(b), **more)


def verdicts(found: Comparison) -> list[tuple[int, str, str]]:
    return [(c.settings["batch"], c.metric, str(c.judgement.verdict)) for c in found.cells]


def test_cells_are_joined_by_what_was_asked_whatever_their_order(tmp_path: Path) -> None:
    a, b = both(tmp_path)
    write_cell(a, STEADY, index=0, batch=1)
    write_cell(a, STEADY, index=1, batch=2)
    write_cell(b, ALIKE, index=1, batch=1, measure__n_process=9, instrument=[], experiment="other")
    write_cell(b, SLOWER, index=0, batch=2, measure__n_process=9, instrument=[], experiment="other")
    found = compared(a, b)
    assert verdicts(found) == [
        (batch, metric, verdict)
        for batch, verdict in ((1, "SAME"), (2, "SLOWER"))
        for metric in ("output_tok_s", "tpot", "step_us")
    ]
    assert found.shown == ("tp", "batch", "enforce_eager", "compile")
    assert found.counts() == {"SAME": 3, "FASTER": 0, "SLOWER": 3, "AMBIGUOUS": 0}
    slow = found.cells[3].row(found.shown)
    assert (slow["metric"], slow["unit"], slow["a_n"], slow["b_n_process"]) == (
        "output_tok_s", "1/s", 30, 5
    )  # fmt: skip
    assert (slow["point_a"], slow["point_b"]) == (f"{1:012x}", f"{0:012x}")
    assert slow["ratio"] == pytest.approx(0.9, abs=0.02)
    assert found.cells[4].judgement.ratio == pytest.approx(1 / slow["ratio"], rel=1e-4)


def test_cells_of_one_side_are_listed_with_what_sets_them_apart(tmp_path: Path) -> None:
    a, b = both(tmp_path)
    write_cell(a, STEADY, index=0, batch=1)
    write_cell(a, STEADY, index=1, batch=4, engine__max_num_seqs=8)
    write_cell(b, ALIKE, index=0, batch=1)
    write_cell(b, ALIKE, index=1, batch=4)
    found = compared(a, b)
    assert len(found.cells) == 3
    (only_a,), (only_b,) = found.only_a, found.only_b
    assert only_a == (
        "tp=2 batch=4 enforce_eager=true compile=off engine.max_num_seqs=8 "
        "(nearest: engine.max_num_seqs=16, not 8)"
    )
    assert only_b.endswith("(nearest: engine.max_num_seqs=8, not 16)")


def test_nothing_in_common_is_refused(tmp_path: Path) -> None:
    a, b = both(tmp_path)
    write_cell(a, STEADY, workload__output_tokens=5)
    write_cell(b, ALIKE, workload__output_tokens=6)
    with pytest.raises(Refused, match=r"is in both; A has .*output_tokens=6, not 5") as said:
        compared(a, b)
    assert "max_num_seqs" not in str(said.value)


def test_sweeps_of_other_batches_are_told_what_sets_them_apart(tmp_path: Path) -> None:
    """Who sweeps batch=1,4 after batch=1,4,16 has given no limit, but each sweep has its own."""
    a, b = both(tmp_path)
    write_cell(a, STEADY, batch=4)
    write_cell(b, ALIKE, batch=4, engine__max_num_seqs=4)
    with pytest.raises(Refused) as said:
        compared(a, b)
    assert str(said.value) == (
        "no cell is in both; A has tp=2 batch=4 enforce_eager=true compile=off "
        "engine.max_num_seqs=16 (nearest: engine.max_num_seqs=4, not 16); compare runs of equal "
        "settings (engine.max_num_seqs that nobody gave is a sweep's largest batch: give it to "
        "both)"
    )


def test_how_a_point_is_measured_tells_cells_apart_where_a_run_sweeps_it(tmp_path: Path) -> None:
    a, b = both(tmp_path)
    for index, instrument in enumerate(([], ["counts"])):
        write_cell(a, STEADY, index=index, instrument=instrument)
        write_cell(b, ALIKE if not index else SLOWER, index=index, instrument=instrument)
    found = compared(a, b, metrics=["tpot"])
    assert [str(c.judgement.verdict) for c in found.cells] == ["SAME", "SLOWER"]
    assert [c.settings["instrument"] for c in found.cells] == ["none", "counts"]
    assert "instrument" in found.shown


def test_other_machines_are_refused_unless_asked_for(tmp_path: Path) -> None:
    a, b = both(tmp_path)
    write_cell(a, STEADY)
    write_cell(b, SLOWER, machine={**MACHINE, "fingerprint": "machine-2", "cpu": "another CPU"})
    with pytest.raises(
        Refused, match=r"other machines: A is a CPU \(machine-1\), B another CPU \("
    ):
        compared(a, b)
    found = compared(a, b, across_machines=True)
    assert found.counts()["SLOWER"] == 3
    unknown = read(b)
    unknown["hardware_fingerprint"] = None
    with pytest.raises(Refused, match="--across-machines"):
        compare(unknown.assign(run_id="c"), unknown)


def test_a_run_is_not_compared_with_itself(tmp_path: Path) -> None:
    a, _ = both(tmp_path)
    write_cell(a, STEADY)
    with pytest.raises(Refused, match="A and B are the same run: run-a"):
        compared(a, a)


def test_an_unknown_metric_is_refused_with_those_that_exist(tmp_path: Path) -> None:
    a, b = both(tmp_path)
    write_cell(a, STEADY)
    write_cell(b, ALIKE)
    with pytest.raises(Refused, match="metric tpots: choose among output_tok_s, "):
        compared(a, b, metrics=["tpots"])


@pytest.mark.parametrize("status", ["error", "contaminated", "oom"])
def test_a_point_that_is_not_ok_is_never_judged(tmp_path: Path, status: str) -> None:
    a, b = both(tmp_path)
    write_cell(a, STEADY)
    write_cell(b, SLOWER, status=status, reason="boom")
    found = compared(a, b)
    assert {str(c.judgement.verdict) for c in found.cells} == {"AMBIGUOUS"}
    assert {c.judgement.reason for c in found.cells} == {f"B {status}: boom"}


def test_a_point_that_failed_on_one_side_stays_in_the_table(tmp_path: Path) -> None:
    a, b = both(tmp_path)
    write_cell(a, STEADY)
    write_cell(b, [], status="error", reason="boom")
    (first, *_) = compared(a, b).cells
    assert (first.judgement.verdict, first.judgement.reason) == ("AMBIGUOUS", "B error: boom")
    assert first.judgement.ratio is None


def test_cells_that_neither_side_measured_are_noted_and_left_out(tmp_path: Path) -> None:
    a, b = both(tmp_path)
    for run, rates in ((a, STEADY), (b, ALIKE)):
        write_cell(run, rates, index=0)
        for index in (1, 2):
            write_cell(run, [], index=index, status="skipped", enforce_eager=False, batch=index)
    found = compared(a, b)
    assert len(found.cells) == 3
    assert found.notes == ("2 cells: skipped on both sides",)


def test_a_setting_that_came_later_keeps_no_cells_apart(tmp_path: Path) -> None:
    a, b = both(tmp_path)
    for index, batch in enumerate((1, 2)):
        write_cell(a, STEADY, index=index, batch=batch)
        write_cell(b, ALIKE, index=index, batch=batch, engine__later=7, measure__later=8)
    found = compared(a, b, metrics=["tpot"])
    assert verdicts(found) == [(1, "tpot", "SAME"), (2, "tpot", "SAME")]
    assert found.notes == ("engine.later: no such setting in A, 7 in B",)
    write_cell(b, SLOWER, index=2, batch=2, engine__later=9)
    with pytest.raises(Refused, match="no cell is in both"):
        compared(a, b)


def frames(tmp_path: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    a, b = both(tmp_path)
    write_cell(a, STEADY)
    write_cell(b, SLOWER)
    return read(a), read(b)


def test_a_figure_of_neither_side_is_noted_of_one_side_it_is_ambiguous(tmp_path: Path) -> None:
    a, b = frames(tmp_path)
    found = compare(a.assign(step_us=None), b.assign(step_us=None, tpot=None))
    assert verdicts(found) == [(2, "output_tok_s", "SLOWER"), (2, "tpot", "AMBIGUOUS")]
    assert found.cells[1].judgement.reason == "B has no figure: it is null in every repeat"
    (note,) = found.notes
    assert note.endswith("step_us is on neither side")
    with pytest.raises(Refused, match="nothing to compare: .* tok_s_per_gpu is on neither side"):
        compare(a, b, ["tok_s_per_gpu"])


def test_times_of_different_clocks_are_never_compared(tmp_path: Path) -> None:
    a, b = frames(tmp_path)
    found = compare(a, b.assign(step_source="stamps"), ["step_us", "tpot"])
    assert verdicts(found) == [(2, "step_us", "AMBIGUOUS"), (2, "tpot", "SLOWER")]
    assert found.cells[0].judgement.reason == "times by host and by stamps"


@pytest.mark.parametrize("side", ["A", "B"])
def test_a_run_under_nsys_decides_nothing(tmp_path: Path, side: str) -> None:
    """Its speed holds what nsys costs, though its settings are those of the other run."""
    a, b = both(tmp_path)
    for name, run, rates in (("A", a, STEADY), ("B", b, SLOWER)):
        watched = ["collectives", "nsys"] if name == side else ["collectives"]
        write_cell(run, rates, instrument=watched)
    found = compared(a, b)
    assert found.counts() == {"SAME": 0, "FASTER": 0, "SLOWER": 0, "AMBIGUOUS": 3}
    assert {cell.judgement.reason for cell in found.cells} == {f"{side} ran under nsys"}


@pytest.mark.parametrize(("mhz", "verdict"), [(1950.0, "SLOWER"), (1900.0, "AMBIGUOUS")])
def test_gpus_that_ran_at_other_clocks_decide_nothing(
    tmp_path: Path, mhz: float, verdict: str
) -> None:
    a, b = (frame.assign(sm_clock_mhz=at) for frame, at in zip(frames(tmp_path), (1980.0, mhz),
                                                                strict=True))  # fmt: skip
    (found,) = compare(a, b, ["tpot"]).cells
    assert found.judgement.verdict == verdict
    if verdict == "AMBIGUOUS":
        assert found.judgement.reason == "the GPUs ran at 1,980 MHz in A and 1,900 MHz in B"
        assert compare(a, b, ["tpot"], across_machines=True).counts()["SLOWER"] == 1


def test_what_the_rows_say_of_their_machine_stands_below_the_table(tmp_path: Path) -> None:
    """Once for all cells that say alike, whose verdicts do not change."""
    sides = [tmp_path / "run-a", tmp_path / "run-b"]
    for run, rates in zip(sides, (STEADY, ALIKE), strict=True):
        for index, batch in enumerate((1, 2)):
            write_cell(run, rates, index=index, batch=batch)
    a, b = map(read, sides)
    quiet = compare(a, b, ["tpot"])
    b["notes"] = "throttled: sw_power_cap on GPU 0 in 9%; busy machine: other processes used 1 of 2"
    a.loc[a["point_id"] == a["point_id"].iloc[0], "notes"] = (
        "flag: a step uses 0.1%; cache on a busy machine"
    )
    found = compare(a, b, ["tpot"])
    assert found.counts() == quiet.counts() and quiet.notes == ()
    assert found.notes == (
        "tp=2 batch=1 enforce_eager=true compile=off: A was measured with the notes flag",
        "2 cells: B was measured with the notes busy machine, throttled",
    )
    assert compare(a.assign(notes=pd.NA), b.assign(notes=pd.NA), ["tpot"]).notes == ()
