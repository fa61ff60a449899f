"""What profiling and timing a point must not do to its figures, on imaginary GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from harness.store import Results, load
from harness.sweep.point import measure_point
from tests.support.clocks import Clock
from tests.support.fake_backend import make_cfg, make_point
from tests.support.fake_gpu_backend import FakeGpuBackend, name_of

GRAPH = {"enforce_eager": False, "timing": "stamps", "device": "cuda"}
PLAIN_S, DISTURBED_S = 1e-3, 50e-3


class Slowed(FakeGpuBackend):
    """A window takes 1 ms, and 50 ms with anything attached. `log`: (attached, prompts' lengths,
    tokens asked) of each window."""

    def __init__(self, cfg: dict[str, Any], clock: Clock) -> None:
        super().__init__(cfg, "graph")
        self.clock = clock
        self.log: list[tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...]]] = []
        self.names: tuple[str, ...] = ()

    def attach(self, factories: Sequence[Any]) -> None:
        super().attach(factories)
        self.names = tuple(map(name_of, factories))

    def detach(self) -> list[list[Any]]:
        self.names = ()
        return super().detach()

    def generate(self, prompts: Any, params: Any, arrivals_s: Any = None) -> list[Any]:
        asked = tuple(p.max_tokens for p in params)
        self.log.append((self.names, tuple(map(len, prompts)), asked))
        self.clock.now += DISTURBED_S if self.names else PLAIN_S
        return super().generate(prompts, params, arrivals_s)


def measure(
    tmp_path: Path, clock: Clock, instrument: list[str], **changes: Any
) -> tuple[Results, Slowed]:
    cfg = make_cfg(results_dir=str(tmp_path / "runs"), instrument=instrument, **GRAPH | changes)
    backend = Slowed(cfg, clock)
    run = tmp_path / "runs" / "run7"
    outcome = measure_point(backend, make_point(cfg), run / "points" / "p")
    assert outcome.status == "ok", outcome
    return load(run), backend


@pytest.mark.parametrize("instrument", [
    [], ["collectives"], ["collectives", "counts"], ["collectives", "profiler"],
    ["collectives", "nsys"],
])  # fmt: skip
def test_no_pass_with_instruments_feeds_the_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, instrument: list[str]
) -> None:
    """Fifty times slower with anything attached: tokens/s are those of the windows without, and a
    step's time is that of the pass of two stamps, whatever the others took."""
    if "nsys" in instrument:
        pytest.importorskip("nvtx")
    results, _ = measure(tmp_path, Clock(monkeypatch), instrument)
    points = results.points
    assert points["wall_s"].tolist() == pytest.approx([PLAIN_S] * 2, rel=1e-6)
    rows = results.metrics
    speeds = rows[rows["name"].isin(["output_tok_s", "total_tok_s", "decode_tok_s", "tpot"])]
    assert set(speeds["pass"]) == {"plain"}
    rates = rows[(rows["name"] == "output_tok_s") & rows["repeat"].notna()]["value"]
    assert rates.tolist() == pytest.approx([10 / PLAIN_S] * 2, rel=1e-6)
    steps = rows[(rows["name"] == "step_us") & rows["value"].notna()]
    assert set(steps["pass"]) == ({"step"} if instrument else set())
    cost = rows[(rows["name"] == "instrument_share") & (rows["phase"] == "decode")]["value"]
    assert cost.tolist() == pytest.approx([0.06] if instrument else [])


def test_a_profile_is_captured_after_every_shape_was_warm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One window stands inside the captured range, the last; before it the same requests ran with
    nothing attached, the first time as warm-up."""
    pytest.importorskip("nvtx")
    _, backend = measure(tmp_path, Clock(monkeypatch), ["collectives", "nsys"])
    captured = [
        place for place, (names, *_) in enumerate(backend.log) if "CaptureObserver" in names
    ]
    assert captured == [len(backend.log) - 1]
    before = [shape for names, *shape in backend.log[: captured[0]] if not names]
    assert len(before) == 3, "a warm-up and two repeats"
    assert all(shape == list(backend.log[-1][1:]) for shape in before)


def test_a_collective_that_nothing_can_time_is_null_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside a graph the host's clock sees one launch; no latency is made of it."""
    results, backend = measure(tmp_path, Clock(monkeypatch), ["collectives"], timing="host")
    assert backend.passes == []
    rows = results.metrics
    for name in ("latency_us", "transfer_us", "wait_us", "comm_share"):
        found = rows[rows["name"] == name]
        assert len(found) and found["value"].isna().all()
        assert set(found["reason"]) == {"collectives were not timed (instrument)"}
    (note,) = set(results.points["notes"])
    assert note == (
        "instrument collectives left out: on a GPU the host's clock times the launch, not the "
        "collective"
    )
    assert results.collectives.empty and not pd.isna(results.points["wall_s"]).any()
