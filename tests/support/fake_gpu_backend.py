"""A backend on two imaginary GPUs: hands over what the GPU's observers would, with known times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.comm.types import Kind
from harness.observers import (
    Backlog,
    CaptureObserver,
    CountObserver,
    EventObserver,
    NvtxObserver,
    ProfilerObserver,
    Stamp,
)
from harness.observers.records import (
    SPLIT_DTYPE,
    STEP_DTYPE,
    BacklogRecord,
    CountRecord,
    ProfileRecord,
    RankRecord,
)
from tests.support.fake_backend import DECODE, FakeBackend, host_records

FLOOR_NS, GRAPH_FLOOR_NS, TICK_NS = 3_000, 2_000, 1_000
LATENCY_NS, WAIT_NS, SPAN_NS, KERNEL_NS = 10_000, 20_000, 100_000, 8_000
CLEAN_NS, TIMED_NS = 1_000_000, 1_060_000
COMPUTE_NS, IDLE_NS, BESIDE_NS = 700_000, 200_000, 20_000
NAMES = {Kind.ALL_REDUCE: "AllReduce_Sum_f32", Kind.GATHER: "SendRecv", Kind.BROADCAST: "Broadcast"}


def name_of(factory: Any) -> str:
    """Of a class that is a factory, or of the class of one with settings."""
    return str(getattr(factory, "__name__", type(factory).__name__))


class FakeGpuBackend(FakeBackend):
    """Every collective takes LATENCY_NS and its floor, rank 0 waits WAIT_NS in each besides;
    without a backlog a pair reads SPAN_NS. Replays run on buckets of twice the batch.

    Attributes to set: `starved` (indices among the measured steps of the backlog pass).
    """

    def __init__(self, cfg: dict[str, Any], mode: str) -> None:
        super().__init__(cfg)
        self.effective |= {"device": "cuda", "mode": mode, "dtype": "bfloat16",
                           "enforce_eager": not mode.startswith("graph")}  # fmt: skip
        self.mode = mode
        self.starved: list[int] = []
        self.passes: list[list[str]] = []
        self._observers: list[Any] = []
        self._since: list[tuple[int, int, int, int]] = []

    def attach(self, factories: Sequence[Any]) -> None:
        self._observers = list(factories)
        self.passes.append([name_of(f) for f in factories])
        self._since = []

    def drain_steps(self) -> list[np.ndarray]:
        first = self._step
        logs = super().drain_steps()
        self._since += [(first + i, *row) for i, row in enumerate(self._plan_of(logs[0]))]
        return logs

    def _plan_of(self, log: np.ndarray) -> list[tuple[int, int, int]]:
        return [(int(r["phase"]), int(r["tokens"]), int(r["samples"])) for r in log]

    def detach(self) -> list[list[Any]]:
        made, self._observers = self._observers, []
        kinds = {name_of(f) for f in made}
        return [[self._result(f, kinds, rank) for f in made] for rank in range(self.tp)]

    def _result(self, factory: Any, kinds: set[str], rank: int) -> Any:
        if isinstance(factory, Stamp) or factory is EventObserver:
            timed = not isinstance(factory, Stamp) or factory.collectives
            return self._record(rank, timed, "Backlog" in kinds)
        if factory is CountObserver:
            return self._counts(rank)
        if isinstance(factory, Backlog):
            numbers = np.array([step for step, *_ in self._since])
            half = len(numbers) // 2  # the warm-up comes first
            bad = np.isin(np.arange(len(numbers)) - half, self.starved) & (rank == 1)
            return BacklogRecord(rank, numbers, bad, 40_000.0)
        if factory in (CaptureObserver, NvtxObserver):
            return len(self._since)
        assert factory is ProfilerObserver, factory
        return self._profile(rank)

    def replays(self, phase: int) -> bool:
        return phase == DECODE and self.mode.startswith("graph")

    def _record(self, rank: int, timed: bool, backlog: bool) -> RankRecord:
        plan = [
            (phase, 2 * tokens if self.replays(phase) else tokens, samples)
            for _, phase, tokens, samples in self._since
        ]
        record = host_records(self.tp, plan)[rank]
        steps, rows = record.steps, record.collectives
        numbers = np.array([step for step, *_ in self._since])
        replayed = np.array([self.replays(phase) for _, phase, _, _ in self._since])
        steps["tokens"][replayed] //= 2
        steps["mode"] = replayed
        steps["end_ns"] = steps["begin_ns"] + (TIMED_NS if timed and self.tp > 1 else CLEAN_NS)
        of_row = replayed[rows["step"]]
        rows["bytes"][of_row & (rows["kind"] == Kind.GATHER)] *= 2
        held = of_row | backlog
        floor = np.where(of_row, GRAPH_FLOOR_NS, FLOOR_NS)
        waits = WAIT_NS if rank == 0 else 0
        rows["after_ns"] = rows["before_ns"] + np.where(held, LATENCY_NS + waits + floor, SPAN_NS)
        steps["step"], rows["step"] = numbers, numbers[rows["step"]]
        return RankRecord(
            rank=rank, world=self.tp, steps=steps, collectives=rows if timed else rows[:0],
            floor_ns=FLOOR_NS, tick_ns=TICK_NS, modes=("eager", self.mode),
            dtypes=("float32", "int64"), paths=("nccl",), source="stamps",
            graph_floor_ns=GRAPH_FLOOR_NS,
        )  # fmt: skip

    def _counts(self, rank: int) -> CountRecord:
        record = self._record(rank, True, False)
        found = CountRecord(rank, self.tp)
        for step, replayed in zip(record.steps["step"], record.steps["mode"], strict=True):
            count = int((record.collectives["step"] == step).sum())
            found.steps[int(step)] = {} if replayed else {("all_reduce", "embed"): [count, 0]}
        return found

    def _profile(self, rank: int) -> ProfileRecord:
        decode = [step for step in self._since if step[1] == DECODE]
        record = self._record(rank, True, False)
        rows = record.collectives[
            np.isin(record.collectives["step"], [step for step, *_ in decode])
        ]
        steps = record.steps[record.steps["phase"] == DECODE].astype(STEP_DTYPE)
        splits = np.zeros(len(steps), SPLIT_DTYPE)
        splits["kernels"], splits["extent_ns"] = 40, CLEAN_NS
        splits["compute_ns"], splits["communication_ns"] = COMPUTE_NS, 7 * KERNEL_NS
        splits["idle_ns"], splits["beside_ns"] = IDLE_NS + 1000 * rank, BESIDE_NS
        splits["idle_ns"][0] = 99 * IDLE_NS  # the profilers of the ranks do not start together
        return ProfileRecord(
            rank=rank, world=self.tp, steps=steps, modes=record.modes,
            names=[f"ncclDevKernel_{NAMES[Kind(k)]}_RING_LL(x)" for k in rows["kind"]],
            begin_ns=rows["before_ns"], duration_ns=np.full(len(rows), KERNEL_NS + 500 * rank),
            splits=splits,
        )  # fmt: skip
