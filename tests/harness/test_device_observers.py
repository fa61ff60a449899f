"""The GPU's observers on a GPU whose clock is the test's, so that every reading is known."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch

from engine.comm.types import Kind, ObserverContext, Phase, Site, StepInfo
from harness import observers
from harness.observers import (
    Backlog,
    BacklogObserver,
    EventObserver,
    ProfilerObserver,
    Stamp,
    StampObserver,
)
from harness.observers.device import MAX_COLLECTIVES
from harness.observers.profiler import PROFILED, SKIPPED
from harness.records import RankRecord
from tests.support.fake_gpu import (
    FakeEvents,
    FakeGpu,
    FakeGraphs,
    FakeRing,
    GpuCommunicator,
    collectives,
    info,
)


def rehearse(kind: Kind, nbytes: int, dtype: str) -> Any:
    """No test but one asks for it."""
    return lambda: None


def context(align: Any = lambda: None) -> ObserverContext:
    return ObserverContext(0, 2, "cuda:0", align, rehearse)


def launched(comm: GpuCommunicator, number: int, mode: str = "eager", layers: int = 2) -> None:
    comm.step_begin(info(number, mode=mode))
    comm.gpu.work(100)
    collectives(comm, layers=layers)
    comm.step_end(info(number, mode=mode))


def pairs(record: RankRecord) -> list[int]:
    return (record.collectives["after_ns"] - record.collectives["before_ns"]).tolist()


STEP = [5000] * 5 + [7000] * 2


def test_stamps_of_launched_steps() -> None:
    gpu = FakeGpu()
    comm, ring = GpuCommunicator(gpu), FakeRing(gpu, rows=4)
    comm.attach([StampObserver(context(), ring=ring)])
    for number in range(10, 20):
        launched(comm, number)
    record = pickle.loads(pickle.dumps(comm.observers[0].result()))
    assert ring.reads == 3  # twice when full, once at the end
    assert record.steps["step"].tolist() == list(range(10, 20))
    assert pairs(record) == STEP * 10
    assert (record.steps["end_ns"] - record.steps["begin_ns"]).tolist() == [39_100] * 10
    assert record.steps["begin_ns"].tolist() == [1_000_000 + 39_100 * i for i in range(10)]
    assert record.collectives["ordinal"].tolist() == list(range(7)) * 10
    assert record.collectives["kind"][:7].tolist() == [Kind.ALL_REDUCE] * 5 + [
        Kind.GATHER, Kind.BROADCAST,
    ]  # fmt: skip
    assert record.collectives["bytes"][:7].tolist() == [64] * 5 + [48, 16]
    assert (record.source, record.tick_ns) == ("stamps", 1024)
    assert (record.floor_ns, record.graph_floor_ns) == (3000, 2000)
    comm.close()


@pytest.mark.parametrize("timer", ["stamps", "events"])
def test_replays_have_a_row_each_and_the_step_of_the_capture_has_none(timer: str) -> None:
    """Two buckets alternating with a launched prefill, over a ring that fills several times; the
    speed of the collectives changes between replays."""
    gpu = FakeGpu()
    comm = GpuCommunicator(gpu)
    observer: Any
    if timer == "stamps":
        observer = StampObserver(context(), ring=FakeRing(gpu, rows=4))
    else:
        observer = EventObserver(context(), events=FakeEvents(gpu))
    comm.attach([observer])
    graphs = FakeGraphs(comm)
    for number in range(12):
        if number % 3 == 2:
            launched(comm, number)
        else:
            graphs.step(number, bucket=2 if number % 3 == 0 else 4)
    record = observer.result()
    kept = [n for n in range(12) if n not in (0, 1)]  # 0 and 1 captured their buckets
    assert record.steps["step"].tolist() == kept
    by_step = {n: record.collectives[record.collectives["step"] == n] for n in kept}
    for number, rows in by_step.items():
        rows = np.sort(rows, order="ordinal")
        assert (rows["after_ns"] - rows["before_ns"]).tolist() == STEP
        size = 128 if number % 3 == 1 else 64
        assert rows["bytes"][:5].tolist() == [size] * 5
        assert record.modes[record.steps["mode"][kept.index(number)]] == (
            "eager" if number % 3 == 2 else "graph"
        )
    lasted = (record.steps["end_ns"] - record.steps["begin_ns"]).tolist()
    assert lasted == [39_100 if n % 3 == 2 else 39_000 for n in kept]
    comm.close()


def test_rooted_collectives_are_run_again_with_the_ranks_aligned() -> None:
    """Their own floor, 3 us launched, is taken off; all-reduces need no such run."""
    gpu = FakeGpu()
    comm = GpuCommunicator(gpu)
    log: list[str] = []

    def again(kind: Kind, nbytes: int, dtype: str) -> Any:
        def run() -> None:
            log.append(f"{kind.label} {nbytes} {dtype}")
            comm.rehearse(kind, nbytes, dtype)()

        return run

    aligned = ObserverContext(0, 2, "cuda:0", lambda: log.append("align"), again)
    observer = StampObserver(aligned, ring=FakeRing(gpu))
    comm.attach([observer])
    for number in range(3):
        launched(comm, number)
    record = pickle.loads(pickle.dumps(observer.result()))
    assert log == ["align", "gather 48 float32", "align", "broadcast 16 int64"]
    assert record.rooted_ns == {(Kind.GATHER, 48): 4000, (Kind.BROADCAST, 16): 4000}
    comm.close()


def test_steps_alone_have_two_stamps() -> None:
    gpu = FakeGpu()
    comm = GpuCommunicator(gpu)
    comm.attach([StampObserver(context(), collectives=False, ring=FakeRing(gpu))])
    graphs = FakeGraphs(comm)
    for number in range(6):
        graphs.step(number, 2)
    launched(comm, 6)
    record = comm.observers[0].result()
    assert record.steps["step"].tolist() == [1, 2, 3, 4, 5, 6] and len(record.collectives) == 0
    assert (record.steps["end_ns"] - record.steps["begin_ns"]).tolist() == [39_000] * 5 + [39_100]
    comm.close()


def test_a_step_of_too_many_collectives_is_refused() -> None:
    gpu = FakeGpu()
    comm = GpuCommunicator(gpu)
    comm.attach([StampObserver(context(), ring=FakeRing(gpu))])
    comm.step_begin(info(0))
    for _ in range(MAX_COLLECTIVES):
        comm.all_reduce(torch.zeros(1, 1), Site.EMBED)
    with pytest.raises(RuntimeError, match=r"step 0 has more than 256 collectives"):
        comm.all_reduce(torch.zeros(1, 1), Site.EMBED)
    comm.close()


def test_no_steps_make_an_empty_record() -> None:
    gpu = FakeGpu()
    for observer in (
        StampObserver(context(), ring=FakeRing(gpu)),
        EventObserver(context(), events=FakeEvents(gpu)),
    ):
        record = observer.result()
        assert len(record.steps) == 0 and len(record.collectives) == 0


def test_events_of_a_graph_are_external_and_the_others_are_used_again() -> None:
    gpu = FakeGpu()
    comm, events = GpuCommunicator(gpu), FakeEvents(gpu)
    comm.attach([EventObserver(context(), events=events)])
    prepared = len(events.made)
    for number in range(5):
        launched(comm, number)
    assert len(events.made) == prepared and not any(e.external for e in events.made)
    graphs = FakeGraphs(comm)
    for number in range(5, 9):
        graphs.step(number, 2)
    assert [e.external for e in events.made[prepared:]] == [True] * 16  # 2 and 7 pairs
    record = comm.observers[0].result()
    assert record.source == "events" and (record.floor_ns, record.graph_floor_ns) == (5000, 4700)
    assert pairs(record) == STEP * 8
    comm.close()


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


def test_factories_survive_pickling_and_name_the_timer() -> None:
    assert pickle.loads(pickle.dumps(Stamp(collectives=False))) == Stamp(collectives=False)
    assert pickle.loads(pickle.dumps(Backlog(5.0, 3))) == Backlog(5.0, 3)
    for timing, made in (("stamps", Stamp()), ("events", EventObserver)):
        assert observers.factories(["counts", "collectives"], timing)["collectives"] == made


def test_a_replayed_step_is_told_from_a_launched_one() -> None:
    assert StepInfo(0, Phase.DECODE, 1, 1, 1, 1, "graph+compiled-model").replayed
