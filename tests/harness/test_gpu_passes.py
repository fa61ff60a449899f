"""Points on imaginary GPUs, from the passes to the tables: every figure has one right value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from harness.calibration.file import Calibration, path_of
from harness.measuring.attribution import join
from harness.measuring.step_times import StepTimes
from harness.rows.collectives import instrument_cost
from harness.rows.figures import FigureRows
from harness.store import Results, load
from harness.sweep.point import PointOutcome, measure_point
from harness.tables.report import summary, view
from tests.support.fake_backend import DECODE, host_records, make_cfg, make_point
from tests.support.fake_gpu_backend import FakeGpuBackend

GRAPH = {"enforce_eager": False, "timing": "stamps", "device": "cuda"}
EAGER = {"timing": "stamps", "device": "cuda"}
BOTH = ["collectives", "counts"]


def measure(
    tmp_path: Path, mode: str, starved: list[int] | None = None, **changes: Any
) -> tuple[PointOutcome, Results, FakeGpuBackend]:
    changes.setdefault("instrument", BOTH)
    cfg = make_cfg(results_dir=str(tmp_path / "runs"), **changes)
    backend = FakeGpuBackend(cfg, mode)
    backend.starved = starved or []
    backend.captured = [(4, 0.5, 1 << 20), (2, 0.25, 1 << 19)] if mode.startswith("graph") else []
    point = make_point(cfg)
    run = tmp_path / "runs" / "run7"
    outcome = measure_point(backend, point, run / "points" / point.point_id)
    return outcome, load(run), backend


def figure(results: Results, name: str, stat: str = "value", **where: Any) -> Any:
    rows = results.metrics
    rows = rows[(rows["name"] == name) & (rows["stat"] == stat)]
    for column, value in where.items():
        rows = rows[rows[column].isna() if value is None else rows[column] == value]
    assert len(rows) == 1, rows
    value = rows.iloc[0]["value"]
    return None if pd.isna(value) else value


def test_a_point_of_graphs(tmp_path: Path) -> None:
    """Five steps a window, one of them a prefill: 7 collectives of 10 us in each, rank 0 waiting
    20 us more; clean steps of 1000 us, timed ones of 1060."""
    outcome, results, backend = measure(tmp_path, "graph", **GRAPH)
    assert outcome == PointOutcome("ok", None, True)
    assert backend.passes == [["Stamp"], ["CountObserver", "Stamp"]]
    rows = results.collectives
    assert set(rows["pass"]) == {"graph_timed"} and set(rows["source"]) == {"stamps"}
    assert len(rows) == 5 * 7 * 2
    replays = rows[rows["mode"] == "graph"]
    assert set(replays["phase"]) == {"decode"} and len(replays) == 4 * 7 * 2
    assert replays.groupby("rank")["latency_us"].agg(set).to_dict() == {0: {30.0}, 1: {10.0}}
    assert set(replays["floor_us"]) == {2.0} and replays["span_us"].isna().all()
    assert replays["expected_bytes"].dropna().tolist() == (
        replays[replays["expected_bytes"].notna()]["bytes"].tolist()
    )
    gathers = replays[replays["kind"] == "gather"]
    assert set(gathers["bytes"]) == {4 * 64 * 4}  # all rows of the bucket
    prefill = rows[rows["phase"] == "prefill"]
    assert set(prefill["span_us"]) == {100.0} and prefill["latency_us"].isna().all()
    assert set(prefill["transfer_reason"]) == {"span"} and set(prefill["mode"]) == {"eager"}
    assert rows["starved"].isna().all()

    decode = {"phase": "decode"}
    assert figure(results, "transfer_us_per_step", "p50", **decode) == 50.0
    assert figure(results, "wait_us_per_step", "p50", **decode, ranks="max") == 100.0
    assert figure(results, "comm_share", **decode, ranks="0") == pytest.approx(0.21)
    assert figure(results, "comm_share", **decode, ranks="1") == pytest.approx(0.07)
    assert figure(results, "instrument_share", **decode) == pytest.approx(0.06)
    assert figure(results, "instrument_us", **decode) == pytest.approx(60 / 7)
    assert figure(results, "floor_us", ranks="1") == 2.0
    assert figure(results, "tick_us", ranks="1") == 1.0
    assert figure(results, "step_us", "p50", **decode, ranks="max", source="stamps") == 1000.0
    embed = {"site": "embed", "phase": "prefill", "ranks": "max"}
    assert figure(results, "span_us", "p50", **embed) == 100.0
    assert figure(results, "starved_steps") == 0
    assert figure(results, "transfer_bias_us") is None
    assert figure(results, "all_reduces_per_step", "mean") == 5


def test_device_and_host_times_of_steps_stand_apart(tmp_path: Path) -> None:
    _, results, _ = measure(tmp_path, "graph", **GRAPH)
    steps = results.steps
    plain = steps[steps["pass"] == "plain"]
    assert plain["device_us"].isna().all()  # the host saw only the launch
    assert set(plain[plain["rank"] == 0]["host_us"]) == {1002.0}
    device = steps.groupby("pass")["device_us"].agg(lambda v: set(v.dropna())).to_dict()
    assert device == {"plain": set(), "step": {1000.0}, "graph_timed": {1060.0}}
    assert steps.groupby("pass")["source"].agg(set).to_dict() == {
        "plain": {"host"}, "step": {"stamps"}, "graph_timed": {"stamps"}
    }  # fmt: skip
    assert steps.groupby("phase")["mode"].agg(set).to_dict() == {
        "prefill": {"eager"}, "decode": {"graph"}
    }  # fmt: skip


def test_an_eager_point_has_backlog_and_span(tmp_path: Path) -> None:
    outcome, results, backend = measure(tmp_path, "eager", starved=[2, 4], **EAGER)
    assert outcome.status == "ok"
    assert backend.passes == [["Stamp"], ["Backlog", "CountObserver", "Stamp"], ["Stamp"]]
    rows = results.collectives
    held, span = rows[rows["pass"] == "backlog"], rows[rows["pass"] == "span"]
    assert len(held) == len(span) == 5 * 7 * 2
    assert held[held["starved"].astype(bool)].groupby("rank").size().tolist() == [14, 14]
    starved = held[held["starved"].astype(bool)]
    assert starved["latency_us"].isna().all() and set(starved["transfer_reason"]) == {"starved"}
    kept = held[~held["starved"].astype(bool)]
    assert kept.groupby("rank")["latency_us"].agg(set).to_dict() == {0: {30.0}, 1: {10.0}}
    assert set(kept["floor_us"]) == {3.0}
    assert set(span["span_us"]) == {100.0} and span["latency_us"].isna().all()
    assert figure(results, "starved_steps") == 2
    assert "2 of 5 steps starved" in results.points["notes"][0]
    assert "grown to 40000 us" in results.points["notes"][0]
    decode = {"phase": "decode"}
    assert figure(results, "comm_share", **decode, ranks="0") == pytest.approx(0.21)
    # A backlog's steps hold its spins: the cost of the readings comes from the span pass.
    assert figure(results, "instrument_share", **decode) == pytest.approx(0.06)
    share = results.metrics[results.metrics["name"] == "instrument_share"]
    assert set(share["pass"]) == {"span"}
    steps = results.steps
    assert steps[steps["pass"] == "backlog"]["device_us"].isna().all()
    assert set(steps[steps["pass"] == "span"]["device_us"]) == {1060.0}


def test_a_point_that_starved_throughout_has_no_latency(tmp_path: Path) -> None:
    outcome, results, _ = measure(tmp_path, "compiled-model", starved=[0, 1, 2, 3, 4], **EAGER)
    assert outcome.status == "ok"
    rows = results.metrics
    assert rows[rows["name"] == "latency_us"]["value"].isna().all()
    assert figure(results, "comm_share", phase="decode") is None
    assert (rows["value"].isna() == rows["reason"].notna()).all()


def test_cupti_is_matched_by_order_and_compared(tmp_path: Path) -> None:
    outcome, results, _ = measure(tmp_path, "graph", instrument=[*BOTH, "profiler"], **GRAPH)
    assert outcome.status == "ok" and results.points["notes"].isna().all()
    rows = results.collectives
    kernels = rows[rows["pass"] == "profiler"]
    assert len(kernels) == 3 * 7 * 2  # the first of four decode steps is left out
    assert kernels["latency_us"].isna().all() and set(kernels["source"]) == {"cupti"}
    assert kernels.groupby("rank")["kernel_us"].agg(set).to_dict() == {0: {8.0}, 1: {8.5}}
    reduces = kernels[kernels["kind"] == "all_reduce"]
    assert set(reduces["transfer_us"]) == {8.0}
    assert sorted(set(reduces["wait_us"])) == [0.0, 0.5]
    site = {"site": "mlp.down_proj", "phase": "decode"}
    assert figure(results, "kernel_us", "p50", **site, ranks="max") == 8.5
    assert figure(results, "stamp_vs_cupti_us", **site, ranks="0") == pytest.approx(22.0)
    assert figure(results, "stamp_vs_cupti_us", **site, ranks="1") == pytest.approx(1.5)
    assert figure(results, "stamp_vs_cupti_us", **site, ranks="min") == pytest.approx(2.0)


@pytest.mark.parametrize("tp", [1, 2])
def test_what_a_step_computes_and_where_no_kernel_runs(tmp_path: Path, tp: int) -> None:
    """The first profiled step is left out; one rank has no collectives, but kernels."""
    instrument = ["collectives", "profiler"]
    outcome, results, backend = measure(tmp_path, "graph", tp=tp, instrument=instrument, **GRAPH)
    assert outcome.status == "ok" and results.points["notes"].isna().all()
    assert backend.passes[-1] == ["ProfilerObserver"]
    steps = results.steps
    seen = steps[(steps["pass"] == "profiler") & steps["kernels"].notna()]
    assert len(seen) == 3 * tp and set(seen["phase"]) == {"decode"}
    assert set(seen["device_us"]) == {1000.0} and set(seen["source"]) == {"cupti"}
    assert set(seen["compute_us"]) == {700.0} and set(seen["comm_kernel_us"]) == {56.0}
    assert seen.groupby("rank")["idle_us"].agg(set).to_list() == [{200.0}, {201.0}][:tp]
    assert set(seen["idle_comm_us"]) == {20.0} and set(seen["kernels"]) == {40}
    assert steps[steps["pass"] != "profiler"]["compute_us"].isna().all()
    gap = {"phase": "decode", "pass": "profiler"}
    assert figure(results, "launch_gap_us", "p50", **gap, ranks="min") == 200.0
    assert figure(results, "launch_gap_us", "p50", **gap, ranks="max") == 199.0 + tp


def test_a_profile_that_does_not_fit_costs_only_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = FakeGpuBackend._profile

    def short(self: FakeGpuBackend, rank: int) -> Any:
        record = whole(self, rank)
        record.names = record.names[1:]
        return record

    monkeypatch.setattr(FakeGpuBackend, "_profile", short)
    outcome, results, _ = measure(tmp_path, "graph", instrument=[*BOTH, "profiler"], **GRAPH)
    assert outcome.status == "ok"
    assert "profiler pass not used: rank 0: 27 communication kernels" in results.points["notes"][0]
    assert set(results.collectives["pass"]) == {"graph_timed"}


def test_one_gpu_has_a_clean_step_and_no_collectives(tmp_path: Path) -> None:
    outcome, results, backend = measure(
        tmp_path, "graph", tp=1, instrument=["collectives"], **GRAPH
    )
    assert outcome.status == "ok" and backend.passes == [["Stamp"]]
    shares = results.metrics[results.metrics["name"] == "comm_share"]
    assert set(shares["value"].dropna()) == {0.0} and set(shares["n"]) == {0}
    where = {"phase": "decode", "ranks": "max"}
    assert figure(results, "step_us", "p50", **where) == 1000.0
    assert results.points["notes"].isna().all()


def test_without_instruments_a_gpu_has_no_step_time(tmp_path: Path) -> None:
    _, results, _ = measure(tmp_path, "graph", instrument=[], **GRAPH)
    rows = results.metrics
    assert rows[rows["name"] == "step_us"]["value"].isna().all()
    assert figure(results, "step_host_us", "p50", phase="decode") == 1002.0
    assert figure(results, "mbu") is None


def test_ceilings_make_mbu_and_a_column(tmp_path: Path) -> None:
    cfg = make_cfg(results_dir=str(tmp_path / "runs"))
    calibration = Calibration(path_of(cfg["results_dir"]))
    calibration.put("read", [{"name": "read_bytes_s", "value": 1e7}])
    calibration.put("matmul", [{"name": "matmul_flops_s", "value": 1e12}])
    _, results, _ = measure(tmp_path, "graph", **GRAPH)
    moved = figure(results, "step_bytes", phase="decode")
    assert figure(results, "mbu") == pytest.approx(moved / (1e-3 * 2 * 1e7))
    flops = figure(results, "step_flops", phase="decode")
    assert figure(results, "mfu") == pytest.approx(flops / (1e-3 * 2 * 1e12))
    frame = summary(tmp_path / "runs" / "run7")
    headings, rows, _ = view(frame)
    assert "MBU\n%" in headings
    assert (frame["step_p50_us"][0], frame["transfer_us_per_step"][0]) == (1000.0, 50.0)
    assert rows[0][-1] == ""  # 6 % is not worth a remark
    headings, rows, _ = view(frame.assign(instrument_share=0.123))
    assert rows[0][-1] == "reading the collectives adds 12% to a step"


def test_captures_are_rows_of_the_start(tmp_path: Path) -> None:
    _, results, _ = measure(tmp_path, "graph", **GRAPH)
    rows = results.phases[results.phases["bucket"].notna()]
    assert set(rows["phase"]) == {"capture"}
    assert rows[["bucket", "seconds", "bytes"]].to_numpy().tolist() == [
        [4, 0.5, 1 << 20], [2, 0.25, 1 << 19]
    ]  # fmt: skip


def test_the_hosts_clock_times_no_gpu(tmp_path: Path) -> None:
    changes = {**GRAPH, "timing": "host", "instrument": ["collectives"]}
    outcome, results, backend = measure(tmp_path, "graph", **changes)
    assert outcome.status == "ok" and backend.passes == []
    assert "times the launch, not the collective" in results.points["notes"][0]


def test_instruments_are_charged_to_the_rank_that_does_not_wait(tmp_path: Path) -> None:
    """Rank 0 waits 300 us in the clean pass and 100 in the other; reading costs 2 us each."""
    joined = join(host_records(2, [(DECODE, 2, 2)] * 4))
    phase, count = joined.steps["phase"], len(joined.rows) // 4
    clean = StepTimes(phase, np.tile([1300.0, 1000.0], (4, 1)), "stamps", "step")
    timed = np.tile([1100.0 + 2 * count, 1000.0 + 2 * count], (4, 1))
    rows = FigureRows({"run_id": "r", "point_id": "p", "process": 0})
    instrument_cost(rows, joined, StepTimes(phase, timed, "stamps", "graph_timed"), clean)
    found = {r["name"]: r["value"] for r in rows.rows if r["phase"] == "decode"}
    assert found == {"instrument_us": 2.0, "instrument_share": pytest.approx(2 * count / 1000)}
