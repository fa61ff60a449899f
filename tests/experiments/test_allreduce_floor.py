"""Collectives alone against those in steps: a run and a calibration of known times."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from experiments.__main__ import main
from experiments.allreduce_floor import EXPERIMENT, summary
from experiments.base import ExperimentError
from harness.calibration.file import Calibration, path_of
from harness.store import Results, load
from harness.sweep.point import measure_point
from tests.support.fake_backend import make_cfg, make_point
from tests.support.fake_gpu_backend import FakeGpuBackend

REDUCED = 4 * 8 * 4
"""Bytes of an all-reduce of the imaginary engine: a bucket of 4 rows of 8 floats."""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Decode steps of graphs, in which every collective takes 10 us, and rank 0 waits 20 more."""
    cfg = make_cfg(enforce_eager=False, timing="stamps", device="cuda",
                   instrument=["collectives"])  # fmt: skip
    run = tmp_path / "runs" / "run"
    measure_point(FakeGpuBackend(cfg, "graph"), make_point(cfg), run / "points" / "p")
    return run


def alone(kind: str, nbytes: int, us: float | None, **changes: Any) -> dict[str, Any]:
    row = {
        "kind": kind, "path": "nccl", "world": 2, "mode": "graph", "bytes": nbytes,
        "transfer_us": us, "stat": "mean", "p10_us": us, "p90_us": us, "n": 1024,
        "mark": "8b x1", "reason": None if us else "starved",
    }  # fmt: skip
    return {**row, **changes}


def calibrate(run: Path, *rows: dict[str, Any]) -> None:
    Calibration(path_of(run.parent)).put("all_reduce/nccl/2/graph", rows)


def test_alone_and_in_steps_side_by_side(run: Path) -> None:
    calibrate(run, alone("all_reduce", REDUCED, 8.0), alone("all_reduce", 2 * REDUCED, 9.0),
              alone("all_reduce", REDUCED, 7.0, mode="eager"))  # fmt: skip
    frame = summary(load(run))
    assert frame["kind"].tolist() == ["all_reduce"] * 3 + ["gather", "broadcast"]
    row = frame[(frame["kind"] == "all_reduce") & (frame["mode"] == "graph")].iloc[0]
    assert (row["bytes"], row["world"], row["path"], row["step"]) == (REDUCED, 2, "nccl", "8b x1")
    assert (row["alone_us"], row["in_step_us"], row["ratio"]) == (8.0, 10.0, 1.25)
    assert (row["alone_n"], row["in_step_n"]) == (1024, 4 * 5)  # decode steps, 2 L + 1 of L = 2
    assert row["algbw"] == row["busbw"] == pytest.approx(REDUCED / 8e3)
    assert row["in_step_algbw"] == row["in_step_busbw"] == pytest.approx(REDUCED / 10e3)
    unseen = frame[frame["in_step_us"].isna()]
    assert unseen["mode"].tolist() == ["eager", "graph"] and unseen["alone_us"].tolist() == [7, 9]
    assert set(unseen["reason"]) == {"no such collective in a decode step of the run"}
    gather = frame[frame["kind"] == "gather"].iloc[0]
    assert gather["in_step_us"] == 30.0  # at the root, waiting included
    assert math.isnan(gather["ratio"]) and gather["reason"] == "not calibrated with 2 ranks"


def test_a_fan_outs_calibration_is_beside_the_folder_that_it_stands_in(run: Path) -> None:
    """`calibrate` writes there, and not below the fan-out."""
    whole = run.parent / "fan-out"
    (whole / "job-000").mkdir(parents=True)
    (whole / "jobs.json").write_text("{}")
    (run / "plan.json").write_text("{}")
    moved = run.rename(whole / "job-000" / "run")
    calibrate(whole, alone("all_reduce", REDUCED, 8.0))
    assert summary(load(whole))["ratio"].max() == 1.25
    with pytest.raises(ExperimentError, match="holds no calibrated collective"):
        summary(load(moved))


def test_a_size_between_two_is_read_off_the_curve(run: Path) -> None:
    calibrate(run, alone("all_reduce", REDUCED // 2, 4.0), alone("all_reduce", REDUCED * 2, 16.0))
    row = summary(load(run)).set_index("bytes").loc[REDUCED]
    assert row["alone_us"] == pytest.approx(8.0) and row["ratio"] == pytest.approx(1.25)
    assert math.isnan(row["alone_n"])


def go_by(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All-reduces of the run have another path."""
    plain = Results.table

    def table(results: Results, *asked: Any) -> Any:
        frame = plain(results, *asked)
        if "path" not in frame:
            return frame
        return frame.assign(path=frame["path"].mask(frame["kind"] == "all_reduce", path))

    monkeypatch.setattr(Results, "table", table)


@pytest.mark.parametrize("own", ["symm_one_shot", "symm_two_shot"])
def test_all_reduces_over_symmetric_memory_stand_beside_its_calibration(
    run: Path, own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrate(run, alone("all_reduce", REDUCED, 8.0, path="symm_mem"),
              alone("all_reduce", REDUCED, 5.0))  # fmt: skip
    go_by(own, monkeypatch)
    frame = summary(load(run))
    rows = frame[frame["in_step_us"].notna()].set_index("kind")
    assert rows["path"].to_dict() == {
        "all_reduce": "symm_mem", "gather": "nccl", "broadcast": "nccl"
    }  # fmt: skip
    assert tuple(rows.loc["all_reduce", ["alone_us", "in_step_us"]]) == (8.0, 10.0)


def test_fused_sums_stand_beside_their_own_curve(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrate(run, alone("all_reduce", REDUCED, 4.0, path="symm_fused"),
              alone("all_reduce", REDUCED, 8.0, path="symm_mem"))  # fmt: skip
    go_by("symm_fused", monkeypatch)
    frame = summary(load(run))
    row = frame[(frame["kind"] == "all_reduce") & frame["in_step_us"].notna()].squeeze()
    assert tuple(row[["path", "alone_us", "in_step_us", "ratio"]]) == ("symm_fused", 4.0, 10.0, 2.5)
    rates = ["algbw", "busbw", "in_step_algbw", "in_step_busbw"]
    assert row[rates].isna().all(), "its time holds an addition and a norm too"


def test_fused_sums_that_are_not_calibrated_say_so(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a file of an earlier version, or measured where GPUs do not reach each other."""
    calibrate(run, alone("all_reduce", REDUCED, 8.0, path="symm_mem"))
    go_by("symm_fused", monkeypatch)
    frame = summary(load(run))
    row = frame[(frame["kind"] == "all_reduce") & frame["in_step_us"].notna()].squeeze()
    assert (row["path"], row["in_step_us"]) == ("symm_fused", 10.0)
    assert row["reason"] == "not calibrated with 2 ranks" and math.isnan(row["ratio"])
    assert EXPERIMENT.verdict(frame).text == "no all-reduce was measured both alone and in a step"


def test_the_claim_is_judged_by_the_ratios_of_all_reduces(run: Path) -> None:
    calibrate(run, alone("all_reduce", REDUCED, 8.0))
    found = EXPERIMENT.verdict(summary(load(run)))
    assert found.holds is True and found.text.startswith("in steps all-reduces take 1.25 of")
    calibrate(run, alone("all_reduce", REDUCED, 20.0))
    found = EXPERIMENT.verdict(summary(load(run)))
    assert found.holds is False and "1 of 1 sizes and modes are more than 25% off" in found.text
    scattered = alone("all_reduce", REDUCED, 20.0, p10_us=9.5, p90_us=90.0)
    calibrate(run, scattered)
    found = EXPERIMENT.verdict(summary(load(run)))
    assert found.holds is None and found.text.endswith("off, 1 of them within p10 to p90 of the "
                                                       "times alone")  # fmt: skip
    calibrate(run, {**scattered, "p10_us": 10.5})
    assert EXPERIMENT.verdict(summary(load(run))).holds is False
    calibrate(run, alone("all_reduce", REDUCED, None))
    frame = summary(load(run))
    assert EXPERIMENT.verdict(frame).holds is None
    assert frame.set_index(["kind", "bytes"]).loc[("all_reduce", REDUCED), "reason"] == "starved"


def test_what_is_missing_is_said(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ExperimentError, match="run python -m harness calibrate on the machine"):
        summary(load(run))
    assert main(["allreduce_floor", str(run)]) == 1
    assert "holds no calibrated collective" in capsys.readouterr().err


def test_one_rank_has_nothing_to_compare(tmp_path: Path) -> None:
    cfg = make_cfg(tp=1, timing="stamps", device="cuda", instrument=["collectives"])
    run = tmp_path / "runs" / "run"
    measure_point(FakeGpuBackend(cfg, "eager"), make_point(cfg), run / "points" / "p")
    calibrate(run, alone("all_reduce", REDUCED, 8.0))
    with pytest.raises(ExperimentError, match="no timed collective of a decode step"):
        summary(load(run))


def test_the_report_names_the_machines_of_others(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calibrate(run, alone("all_reduce", REDUCED, 8.0), alone("all_reduce", 2 * REDUCED, 9.0))
    assert main(["allreduce_floor", str(run), "--out", str(run / "out")]) == 0
    text, told = capsys.readouterr()
    assert told == f"written to {run / 'out'}/allreduce_floor.md, with its table and figure\n"
    assert "| all_reduce | nccl | 2 | graph | 128 | 8b x1 | 8.0 | 8.0 | 8.0 | 1024 | 10.0 |" in text
    assert "Measured by others, on other machines:" in text and "4 of 8 H100" in text
    assert (run / "out" / "allreduce_floor.png").read_bytes()[:4] == b"\x89PNG"
