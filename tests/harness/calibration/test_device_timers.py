"""Stamps and events on a GPU whose clock is the test's, so that every reading is known."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch

from engine.comm.types import Kind, ObserverContext, Phase, Site, StepInfo
from harness import observers
from harness.observers import Backlog, EventObserver, Stamp, StampObserver
from harness.observers.device import MAX_COLLECTIVES
from harness.observers.records import PHASES
from tests.support.fake_gpu import FakeEvents, FakeGpu, FakeGraphs, FakeRing, GpuCommunicator, info
from tests.support.gpu_steps import STEP, context, launched, pairs


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


def timer_of(name: str, gpu: FakeGpu) -> Any:
    if name == "stamps":
        return StampObserver(context(), ring=FakeRing(gpu, rows=4))
    return EventObserver(context(), events=FakeEvents(gpu))


@pytest.mark.parametrize("timer", ["stamps", "events"])
def test_replays_have_a_row_each_and_the_step_of_the_capture_has_none(timer: str) -> None:
    """Two buckets alternating with a launched prefill, over a ring that fills several times; the
    speed of the collectives changes between replays."""
    gpu = FakeGpu()
    comm = GpuCommunicator(gpu)
    observer = timer_of(timer, gpu)
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


@pytest.mark.parametrize("timer", ["stamps", "events"])
def test_graphs_of_as_many_rows_with_and_without_prompts_are_two(timer: str) -> None:
    """All of 4 rows. Decode: 4 of them sample, a sum takes 5 us; prompts: 1 samples, a sum takes
    9 us, in prefill and mixed steps alike, which replay one graph. The second decode step is where
    a graph that the prompts' had overwritten would show first."""
    gpu = FakeGpu()
    comm = GpuCommunicator(gpu)
    observer = timer_of(timer, gpu)
    comm.attach([observer])
    graphs = FakeGraphs(comm)
    turns = [Phase.DECODE, Phase.PREFILL, Phase.DECODE, Phase.MIXED]
    for number in range(12):
        phase = turns[number % 4]
        comm.all_reduce_ns = 5000 if phase is Phase.DECODE else 9000  # heard by a capture alone
        graphs.step(number, 4, phase)
    record = observer.result()
    assert record.steps["step"].tolist() == list(range(2, 12))  # 0 and 1 captured
    phases = [PHASES.index(turns[number % 4]) for number in range(2, 12)]
    assert record.steps["phase"].tolist() == phases
    assert set(record.steps["bucket"]) == {4}
    for number in range(2, 12):
        rows = record.collectives[record.collectives["step"] == number]
        rows = np.sort(rows, order="ordinal")
        decodes = turns[number % 4] is Phase.DECODE
        assert (rows["after_ns"] - rows["before_ns"]).tolist() == (
            [5000] * 5 + [7000] * 2 if decodes else [9000] * 5 + [7000] * 2
        )
        # float32 of a width of 8, of half a vocabulary of 6 for each of two ranks, int64 ids.
        sampled = 4 if decodes else 1
        assert rows["bytes"].tolist() == [128] * 5 + [sampled * 2 * 3 * 4, sampled * 8]
    lasted = (record.steps["end_ns"] - record.steps["begin_ns"]).tolist()
    assert lasted == [39_000 if p == PHASES.index(Phase.DECODE) else 59_000 for p in phases]
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


def test_factories_survive_pickling_and_name_the_timer() -> None:
    assert pickle.loads(pickle.dumps(Stamp(collectives=False))) == Stamp(collectives=False)
    assert pickle.loads(pickle.dumps(Backlog(5.0, 3))) == Backlog(5.0, 3)
    for timing, made in (("stamps", Stamp()), ("events", EventObserver)):
        assert observers.factories(["counts", "collectives"], timing)["collectives"] == made


def test_a_replayed_step_is_told_from_a_launched_one() -> None:
    assert StepInfo(0, Phase.DECODE, 1, 1, 1, 1, "graph+compiled-model").replayed
