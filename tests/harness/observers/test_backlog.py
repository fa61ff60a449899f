"""Backlogs: spins before steps and at their layers, and which of them starved."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from harness.observers import BacklogObserver, StampObserver
from tests.support.fake_gpu import FakeGpu, FakeRing, GpuCommunicator, collectives, info
from tests.support.gpu_steps import STEP, context, launched, pairs


class FakeHold:
    """Spins that have ended when `ends` says so, asked mark by mark."""

    def __init__(self, log: list[str], ends: list[bool]) -> None:
        self.log, self.ends = log, ends
        self.spins: list[float] = []

    def spin(self, us: float) -> None:
        self.log.append("spin")
        self.spins.append(us)

    def mark(self) -> Any:
        return self

    def record(self) -> None:
        self.log.append("mark")

    def query(self) -> bool:
        self.log.append("query")
        return self.ends.pop(0)


def test_a_backlog_holds_each_step_and_tells_which_starved() -> None:
    log: list[str] = []
    held = FakeHold(log, [False, True, False])
    gpu = FakeGpu()
    comm = GpuCommunicator(gpu)
    backlog = BacklogObserver(context(lambda: log.append("align")), 1000.0, held=held)
    comm.attach([backlog, StampObserver(context(), ring=FakeRing(gpu))])
    for number in range(3):
        launched(comm, number)
    assert log == ["spin", "align", "mark", "query"] * 3
    record = pickle.loads(pickle.dumps(backlog.result()))
    assert record.steps.tolist() == [0, 1, 2] and record.starved.tolist() == [False, True, False]
    assert held.spins == [1000.0, 1000.0, 2000.0] and record.spin_us == 2000.0
    comm.close()


@pytest.mark.parametrize(
    ("mode", "layers", "asked", "parts"),
    [
        ("eager", 36, None, 5),
        ("compiled-layer", 36, None, 2),
        ("eager", 6, 4, 2),
        ("graph", 6, 1, 0),
    ],
)
def test_a_long_step_is_cut_at_layers(mode: str, layers: int, asked: Any, parts: int) -> None:
    log: list[str] = []
    held = FakeHold(log, [True] + [False] * 9)
    comm = GpuCommunicator(FakeGpu())
    backlog = BacklogObserver(context(lambda: log.append("align")), 9.0, asked, held=held)
    comm.attach([backlog])
    comm.step_begin(info(0, mode=mode))
    if not mode.startswith("graph"):  # Python does not run in a replay
        collectives(comm, layers=layers)
    comm.step_end(info(0, mode=mode))
    assert log.count("spin") == log.count("align") == log.count("query") == parts
    record = backlog.result()
    assert record.starved.tolist() == ([True] if parts else [])  # one part is enough
    comm.close()


def test_a_cut_lies_outside_the_readings_of_the_timer() -> None:
    """A spin takes 1 ms of the GPU; were it between two readings, a pair would hold it."""
    gpu = FakeGpu()
    comm = GpuCommunicator(gpu)

    class Spinning(FakeHold):
        def spin(self, us: float) -> None:
            gpu.work(1_000_000)

    held = Spinning([], [False] * 9)
    timer = StampObserver(context(), ring=FakeRing(gpu))
    comm.attach([BacklogObserver(context(), 9.0, 1, held=held), timer])
    launched(comm, 0)
    assert pairs(timer.result()) == STEP
    comm.close()
