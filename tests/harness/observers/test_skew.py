"""Delays before one rank's all-reduces: who is delayed, by how much, and that all of it arrives."""

from __future__ import annotations

import pickle
from datetime import UTC, datetime

import numpy as np
import pytest

from engine.comm.types import Phase
from engine.execution.steplog import STEP_DTYPE
from harness.measuring.pass_plan import plan
from harness.measuring.window import Window
from harness.observers import Skew, SkewObserver, StampObserver
from harness.observers.records import SkewRecord
from harness.observers.skew import HostDelay
from harness.rows import steps as step_rows
from harness.settings.config import SettingsError
from harness.settings.validation import validate
from tests.support.fake_backend import make_cfg
from tests.support.fake_gpu import FakeGpu, FakeGraphs, FakeRing, GpuCommunicator, collectives, info
from tests.support.plans import config
from tests.support.ranks import context_of

DELAYS = (0.0, 50.0, 250.0)


class FakeDelay:
    """Takes the FakeGpu's time, 1 us more than it is told."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu, self.us = gpu, 0.0
        self.closed: list[list[float]] = []
        self._open = [0.0, 0.0]

    def set_us(self, us: float) -> None:
        self.us = us

    def __call__(self) -> None:
        def run() -> None:  # the length is read when it runs, a replay's too
            taken = self.us + 1 if self.us else 0.0
            self.gpu.now += round(taken * 1000)
            self._open = [self._open[0] + taken, self._open[1] + 1]

        self.gpu.enqueue(run)

    def close_step(self) -> None:
        self.closed.append(self._open)
        self._open = [0.0, 0.0]

    def measured(self) -> np.ndarray:
        return np.array(self.closed).reshape(len(self.closed), 2)


def observed(rank: int) -> tuple[GpuCommunicator, SkewObserver, StampObserver]:
    gpu = FakeGpu()
    comm = GpuCommunicator(gpu)
    skew = SkewObserver(context_of(rank), 1, DELAYS, delay=FakeDelay(gpu))
    timer = StampObserver(context_of(rank), ring=FakeRing(gpu, rows=64))
    comm.attach([skew, timer])
    return comm, skew, timer


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("rank", [0, 1])
def test_decode_steps_take_turns_and_one_captured_graph_serves_every_delay(
    graph: bool, rank: int
) -> None:
    """The delayed rank's own pairs hold none of its delay, its steps hold all of it."""
    comm, skew, timer = observed(rank)
    graphs = FakeGraphs(comm)
    for number in range(9):
        if graph:
            graphs.step(number, bucket=2)
        else:
            comm.step_begin(info(number))
            collectives(comm)
            comm.step_end(info(number))
    record = pickle.loads(pickle.dumps(skew.result()))
    assert (record.rank, record.delayed) == (rank, rank == 1)
    assert record.steps.tolist() == list(range(9))
    assert record.asked_us.tolist() == [0.0, 50.0, 250.0] * 3
    taken = [0.0, 51.0, 251.0] if rank == 1 else [0.0] * 3
    assert record.taken_us.tolist() == taken * 3
    times = timer.result()
    pairs = times.collectives["after_ns"] - times.collectives["before_ns"]
    assert set(pairs.tolist()) == {5000, 7000}
    lasted = times.steps["end_ns"] - times.steps["begin_ns"]
    kept = times.steps["step"]  # a graph's first step captured it
    expected = [39_000 + 5 * round(1000 * taken[n % 3]) for n in kept]
    assert lasted.tolist() == expected
    comm.close()


def test_prefills_are_not_delayed() -> None:
    comm, skew, _ = observed(1)
    comm.step_begin(info(0, phase=Phase.PREFILL))
    collectives(comm)
    comm.step_end(info(0, phase=Phase.PREFILL))
    record = skew.result()
    assert record.asked_us.tolist() == [0.0] and record.taken_us.tolist() == [0.0]
    comm.close()


def test_a_host_is_delayed_by_what_it_says() -> None:
    delay = HostDelay()
    for us in (0.0, 2000.0):
        delay.set_us(us)
        delay()
        delay()
        delay.close_step()
    first, second = delay.measured()
    assert first[1] == second[1] == 2
    assert first[0] >= 0 and second[0] >= 4000


@pytest.mark.parametrize(
    ("mode", "device", "names", "spans"),
    [
        ("graph", "cuda", ["skew", "collectives"], "launched"),
        ("eager", "cuda", ["backlog", "skew", "collectives"], "none"),
        ("eager", "cpu", ["skew", "collectives"], "none"),
    ],
)
def test_the_pass_is_that_of_the_latencies_with_the_delay_before_the_timer(
    mode: str, device: str, names: list[str], spans: str
) -> None:
    cfg = make_cfg(instrument=["collectives", "skew"],
                   timing="host" if device == "cpu" else "stamps")  # fmt: skip
    passes, notes = plan(cfg, {"device": device, "mode": mode, "tp": 2})
    chosen = next(p for p in passes if p.name == "skew")
    assert list(chosen.factories) == names and chosen.spans == spans and not notes
    assert chosen.factories["skew"] == Skew(1, (0.0, 50.0))
    for effective, wanted in (
        ({"tp": 1}, ["collectives", "skew"]),
        ({"tp": 2}, ["counts", "skew"]),
    ):
        passes, notes = plan(
            {**cfg, "instrument": wanted}, {"device": device, "mode": mode, **effective}
        )
        assert "skew" not in [p.name for p in passes]
        assert notes == ["instrument skew left out: it needs tp above 1 and instrument collectives"]


def test_delays_stand_beside_the_steps() -> None:
    log = np.zeros(3, STEP_DTYPE)
    log["step"], log["phase"] = [7, 8, 9], [0, 1, 1]
    window = Window("skew", 0, [], (), [log, log], 0.0, 1.0, datetime.now(UTC), {})
    records = [
        SkewRecord(rank, rank == 1, np.array([9, 8]), np.array([50.0, 0.0]), np.array(taken))
        for rank, taken in ((0, [0.0, 0.0]), (1, [51.0, 0.0]))
    ]
    table = step_rows.steps({}, [window], "eager", skews={"skew": records})
    nan = np.nan
    assert table["rank"].tolist() == [0, 0, 0, 1, 1, 1]
    assert np.array_equal(table["skew_asked_us"], [nan, 0, 50, nan, 0, 50], equal_nan=True)
    assert np.array_equal(table["skew_us"], [nan, 0, 0, nan, 0, 51], equal_nan=True)
    bare = step_rows.steps({}, [window], "eager")
    assert np.isnan(bare["skew_us"]).all() and np.isnan(bare["skew_asked_us"]).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"measure__skew_rank": 2}, "measure.skew_rank=2: tp=2 has ranks 0 to 1"),
        ({"measure__skew_us": []}, r"measure.skew_us=\[\]: give delays from 0 to 100000 us"),
        ({"measure__skew_us": [0.0, -1.0]}, "give delays from 0 to 100000 us"),
        ({"measure__skew_us": [float("nan")]}, "give delays from 0 to 100000 us"),
    ],
)
def test_impossible_delays_are_refused(changes: dict[str, object], message: str) -> None:
    validate(config(tp=2, instrument=["collectives", "skew"]))
    with pytest.raises(SettingsError, match=message):
        validate(config(tp=2, instrument=["collectives", "skew"], **changes))
    validate(config(tp=2, **changes))
