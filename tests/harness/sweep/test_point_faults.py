"""Points whose figures other harnesses got wrong, on backends whose times are known."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from engine.execution.steplog import STEP_DTYPE
from harness.measuring.step_times import StepTimes
from harness.measuring.window import BUILD_COUNTERS, Window
from harness.rows.figures import FigureRows
from harness.rows.metrics import plain_figures
from harness.store import Results, load
from harness.sweep.point import measure_point
from harness.tables.figures import FIGURES
from tests.support.clocks import Clock
from tests.support.fake_backend import DECODE, PREFILL, FakeBackend, make_cfg, make_point

RATES = ("output_tok_s", "total_tok_s", "prefill_tok_s", "decode_tok_s")


def measure(tmp_path: Path, backend: FakeBackend | None = None, **changes: Any) -> Results:
    cfg = make_cfg(**changes)
    run = tmp_path / "run"
    point = make_point(cfg)
    measure_point(backend or FakeBackend(cfg), point, run / "points" / point.point_id)
    return load(run)


def values(results: Results, name: str, **where: Any) -> pd.DataFrame:
    rows = results.metrics[results.metrics["name"] == name]
    for column, value in where.items():
        rows = rows[rows[column] == value]
    return rows


def log(*steps: tuple[int, int, int]) -> np.ndarray:
    """A step log of (phase, tokens, us of the step), one after the other."""
    rows, at = np.zeros(len(steps), STEP_DTYPE), 0
    for row, (number, (phase, tokens, us)) in zip(rows, enumerate(steps), strict=True):
        row["step"], row["phase"], row["batch"], row["tokens"] = number, phase, tokens, tokens
        row["begin_ns"], row["end_ns"] = at, at + 1000 * us
        row["wall_begin_ns"], row["wall_end_ns"] = at, at + 1000 * us
        at += 1000 * us
    return rows


def test_decode_is_timed_by_itself_however_noisy_the_prefill(tmp_path: Path) -> None:
    """64 sequences, four decode steps of 1 ms, after prefills of 90, 5 and 40 ms: a whole run less
    the mean prefill would give the second repeat 9 ms - 45 ms, a rate below zero."""
    prefills = (90_000, 5_000, 40_000)
    logs = [log((PREFILL, 640, us), *[(DECODE, 64, 1_000)] * 4) for us in prefills]
    windows = [
        Window("plain", n, [], (), [rows], 0.0, (us + 4_000) / 1e6, datetime.now(UTC), {})
        for n, (rows, us) in enumerate(zip(logs, prefills, strict=True))
    ]
    whole = np.array([w.wall_s for w in windows])
    assert (whole - np.mean(prefills) / 1e6).min() < 0
    rows = FigureRows({})
    plain_figures(rows, windows, tp=1, device="cpu", clean=StepTimes.of_windows(windows))
    found = {(r["name"], r["repeat"]): r["value"] for r in rows.rows if r.get("repeat") is not None}
    for repeat, us in enumerate(prefills):
        assert found["decode_tok_s", repeat] == pytest.approx(64_000)
        assert found["prefill_tok_s", repeat] == pytest.approx(640 / (us / 1e6))


@pytest.mark.parametrize(("end", "begin"), [("end_ns", "begin_ns"),
                                            ("wall_end_ns", "wall_begin_ns")])  # fmt: skip
def test_a_time_below_zero_is_an_error_and_no_figure(tmp_path: Path, end: str, begin: str) -> None:
    class Backwards(FakeBackend):
        def drain_steps(self) -> list[np.ndarray]:
            logs = super().drain_steps()
            if len(logs[1]):
                logs[1][end][3] = logs[1][begin][3] - 1
            return logs

    results = measure(tmp_path, Backwards(make_cfg()))
    (row,) = results.points.to_dict("records")
    assert row["status"] == "error"
    assert row["reason"] == (
        f"MeasurementError: step 3 on rank 1: {end} lies before {begin}, so that its time would be "
        "below zero"
    )
    assert results.metrics.empty


def test_four_rates_of_a_long_prompt_are_four_figures(tmp_path: Path) -> None:
    """1024 in: with 2 out every rate is another number, with 1 out there is no decode step."""
    of_output = {}
    for output in (2, 1):
        changes = {"workload__prompt_tokens": 1024, "workload__output_tokens": output}
        backend = FakeBackend(make_cfg(**changes))
        backend.effective["max_model_len"] = 2048
        results = measure(tmp_path / str(output), backend, **changes)
        wall = results.points.set_index("repeat")["wall_s"][0]
        wanted = {
            "output_tok_s": 2 * output / wall,
            "total_tok_s": 2 * (1024 + output) / wall,
            "prefill_tok_s": 2 * 1024 / 1002e-6,
            "decode_tok_s": 2 / 1002e-6 if output == 2 else None,
        }
        for name, value in wanted.items():
            (row,) = values(results, name, repeat=0).to_dict("records")
            if value is None:
                assert pd.isna(row["value"]) and row["reason"] == "no such step in the window"
            else:
                assert row["value"] == pytest.approx(value)
        of_output[output] = set(filter(None, wanted.values()))
    assert (len(of_output[2]), len(of_output[1])) == (4, 3)
    documented = (Path(__file__).parents[3] / "docs" / "tables.md").read_text()
    assert len({FIGURES[name].meaning for name in RATES}) == 4
    assert all(f"`{name}`" in documented and FIGURES[name].meaning in documented for name in RATES)


def test_hits_of_the_prefix_cache_are_recorded(tmp_path: Path) -> None:
    """Should an engine find what an earlier point left, both tables say so. The prompts differ in
    every point, pass and repeat."""
    cfg = make_cfg()
    backend = FakeBackend(cfg)
    backend.grow = {"cached_tokens": 3}
    run = tmp_path / "run"
    for index in range(2):
        point = make_point(cfg, f"{index:012x}", index)
        measure_point(backend, point, run / "points" / point.point_id)
    results = load(run)
    assert results.points["cached_tokens"].tolist() == [3] * 4
    recorded = values(results, "cached_tokens")
    assert recorded["value"].tolist() == [3.0] * 4
    asked = [tuple(prompt) for call in backend.prompts for prompt in call]
    assert len(set(asked)) == len(asked) == 2 * 4 * 2
    assert backend.resets == 2, "the cache is emptied before each point"


@pytest.mark.parametrize(("lost", "said"), [
    (5, "short_output: 1 of 2 requests gave fewer tokens than asked; request 0: 0 of 5"),
    (None, "short_output: 0 of 2 requests came back"),
])  # fmt: skip
def test_an_empty_result_is_no_success(tmp_path: Path, lost: int | None, said: str) -> None:
    class Empty(FakeBackend):
        def generate(self, prompts: Any, params: Any, arrivals_s: Any = None) -> list[Any]:
            outputs = super().generate(prompts, params, arrivals_s)
            if lost is None:
                return []
            outputs[0].token_ids.clear()
            return outputs

    results = measure(tmp_path, Empty(make_cfg()))
    (row,) = results.points.to_dict("records")
    assert row["status"] == "error" and row["reason"] == f"MeasurementError: {said}"
    assert results.metrics.empty


@pytest.mark.parametrize("counter", BUILD_COUNTERS)
def test_whatever_is_built_inside_a_window_contaminates(tmp_path: Path, counter: str) -> None:
    backend = FakeBackend(make_cfg())
    backend.grow = {counter: 1}
    points = measure(tmp_path, backend).points
    assert set(points["status"]) == {"contaminated"}
    assert set(points["reason"]) == {
        f"built inside the measured window: plain pass: {counter} +1; host pass: {counter} +1"
    }


def test_what_the_warm_up_builds_contaminates_nothing(tmp_path: Path) -> None:
    backend = FakeBackend(make_cfg())
    generate = backend.generate

    def building(*arguments: Any) -> Any:
        backend.grow = dict.fromkeys(BUILD_COUNTERS, 2 if not backend.prompts else 0)
        return generate(*arguments)

    backend.generate = building  # type: ignore[method-assign]
    assert set(measure(tmp_path, backend).points["status"]) == {"ok"}


def test_a_late_rank_makes_waiting_and_no_transfer(tmp_path: Path) -> None:
    """2 ms on rank 1 in each of a step's five all-reduces: 10 ms a step of 1 ms, of the rank that
    waits; the share of transfer is what it was."""
    found = {}
    for wait_ns in (0, 2_000_000):
        backend = FakeBackend(make_cfg(), wait_ns=wait_ns)
        results = measure(tmp_path / str(wait_ns), backend)
        found[wait_ns] = {
            (name, rank): float(values(results, name, phase="decode", ranks=rank)["value"].iloc[0])
            for name in ("transfer_share", "wait_share")
            for rank in ("0", "1")
        }
    calm, late = found.values()
    assert calm["wait_share", "0"] == calm["wait_share", "1"] == late["wait_share", "1"] == 0
    assert late["wait_share", "0"] == pytest.approx(5 * 2_000 / 1_000)
    for rank in ("0", "1"):
        assert late["transfer_share", rank] == calm["transfer_share", rank] == (
            pytest.approx(5 * 5 / 1_000)
        )  # fmt: skip


def test_bandwidth_is_of_one_message_size(tmp_path: Path) -> None:
    """No bandwidth is an average over sizes: each has its phase, kind, site and bytes, and is
    those bytes by their time."""
    results = measure(tmp_path)
    for name in ("algbw_GBps", "busbw_GBps"):
        rows = values(results, name, stat="mean")
        assert rows[["phase", "kind", "site", "bytes"]].notna().all(axis=None)
        reduces = rows[rows["kind"] == "all_reduce"]
        assert sorted(set(reduces["bytes"])) == [2 * 8 * 4, 8 * 8 * 4]
        for row in reduces.itertuples():  # 2(n-1)/n is 1 for two ranks
            assert row.value == pytest.approx(row.bytes / 5e3)
    assert not values(results, "busbw_GBps", phase="decode", bytes=8 * 8 * 4).size


@pytest.mark.parametrize(("limits", "repeats", "reason"), [
    ({"max_repeats": 7, "wall_limit_s": 1e9}, 7, "max_repeats"),
    ({"max_repeats": 10**6, "wall_limit_s": 0.00045}, 15, "wall_limit"),
])  # fmt: skip
def test_a_measurement_that_never_gets_steady_ends_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: dict[str, Any], repeats: int,
    reason: str,
) -> None:  # fmt: skip
    """Windows of 20 and 40 us in turn: their noise never falls below a third."""
    clock = Clock(monkeypatch)

    class Noisy(FakeBackend):
        def generate(self, prompts: Any, params: Any, arrivals_s: Any = None) -> list[Any]:
            outputs = super().generate(prompts, params, arrivals_s)
            clock.now += 20e-6 if len(self.prompts) % 2 else 40e-6
            return outputs

    changes = {f"measure__{name}": value for name, value in limits.items()}
    changes |= {"measure__min_repeats": 3, "measure__rel_noise": 0.01}
    points = measure(tmp_path, Noisy(make_cfg(**changes)), **changes).points
    assert len(points) == repeats
    assert set(points["stop_reason"]) == {reason}
    assert points["wall_s"].tolist()[:3] == pytest.approx([40e-6, 20e-6, 40e-6], rel=1e-6)
    assert points["rel_noise"].iloc[0] > 0.3
