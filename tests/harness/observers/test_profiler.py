"""The profiler's observer on kernels made by hand: what it takes, keeps, splits and misses."""

from __future__ import annotations

import pickle

import pytest

from engine.comm.types import Phase
from harness.observers import ProfilerObserver
from harness.observers.profiler import PROFILED, SKIPPED
from tests.support.fake_gpu import info
from tests.support.gpu_steps import context


class FakeProfile:
    def __init__(self, log: list[str]) -> None:
        self._log = log

    def start(self) -> None:
        self._log.append("start")

    def stop(self) -> None:
        self._log.append("stop")

    def kernels(self) -> list[tuple[str, int, int]]:
        return [
            ("ncclDevKernel_Broadcast_RING_LL(x)", 300, 7),
            ("gemm", 150, 90),
            ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(x)", 100, 9),
            *(("_nothing", 1000 + place, 1) for place in range(2, 2 * PROFILED)),
            ("_nothing", 50, 1),
            ("_nothing", 400, 1),
            ("Memcpy HtoD", 20, 5),
        ]


def test_the_profiler_takes_some_decode_steps_and_keeps_communication_by_begin() -> None:
    log: list[str] = []
    observer = ProfilerObserver(context(), lambda: FakeProfile(log), lambda: log.append("mark"))
    numbers = iter(range(100))

    def step(phase: Phase) -> None:
        number = next(numbers)
        observer.step_begin(info(number, phase=phase))
        observer.step_end(info(number, phase=phase))

    step(Phase.PREFILL)
    for _ in range(SKIPPED + PROFILED + 3):
        step(Phase.DECODE)
    assert log == ["start", *["mark"] * (2 * PROFILED), "stop"]
    record = pickle.loads(pickle.dumps(observer.result()))
    first = 1 + SKIPPED
    assert record.steps["step"].tolist() == list(range(first, first + PROFILED))
    assert [name[:23] for name in record.names] == [
        "ncclDevKernel_AllReduce", "ncclDevKernel_Broadcast",
    ]  # fmt: skip
    assert record.begin_ns.tolist() == [100, 300] and record.duration_ns.tolist() == [9, 7]
    assert record.error is None
    # kernels, extent, compute, communication, idle, beside a communication kernel
    assert record.splits.tolist() == [(3, 207, 90, 16, 101, 101)] + [(0,) * 6] * (PROFILED - 1)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("graph", (3, 30, 19, 0, 11, 0)), ("eager", (5, 190, 29, 0, 161, 0))],
)
def test_a_replay_is_its_graph_without_the_copies_round_it(
    mode: str, expected: tuple[int, ...]
) -> None:
    class OneStep(FakeProfile):
        def kernels(self) -> list[tuple[str, int, int]]:
            of_step = [("_nothing", 0, 1), ("Memcpy HtoD (x)", 10, 5),
                       ("gemm", 100, 9), ("Memcpy DtoD", 115, 2), ("gemm", 122, 8),
                       ("Memcpy DtoH (x)", 195, 5), ("_nothing", 210, 1)]  # fmt: skip
            return [
                (name, 1000 * step + begin, ns)
                for step in range(PROFILED)
                for name, begin, ns in of_step
            ]

    observer = ProfilerObserver(context(), lambda: OneStep([]), lambda: None)
    for number in range(SKIPPED + PROFILED):
        observer.step_begin(info(number, mode=mode))
        observer.step_end(info(number, mode=mode))
    assert observer.result().splits.tolist() == [expected] * PROFILED


def test_marks_that_cupti_lost_are_said() -> None:
    observer = ProfilerObserver(context(), lambda: FakeProfile([]), lambda: None)
    for number in range(SKIPPED + PROFILED - 1):
        observer.step_begin(info(number))
        observer.step_end(info(number))
    assert observer.result().error == "CUPTI reported 24 kernels _nothing round 11 steps"


def test_too_few_decode_steps_for_a_profile_are_said() -> None:
    observer = ProfilerObserver(context(), lambda: FakeProfile([]), lambda: None)
    record = observer.result()
    assert record.error == f"the window has no more than {SKIPPED} decode steps"
