"""A GPU whose clock the test sets: work takes the time it is told, readings take none, and what is
enqueued while a graph is captured runs when it is replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from engine.comm.base import Communicator
from engine.comm.types import Phase, Site, StepInfo
from harness.observers.device import SLOTS

Op = Callable[[], None]


class FakeGpu:
    """Runs what is enqueued at once, or notes it while `capturing`."""

    def __init__(self) -> None:
        self.now = 1_000_000  # ns
        self._noted: list[Op] | None = None

    def enqueue(self, op: Op) -> None:
        if self._noted is None:
            op()
        else:
            self._noted.append(op)

    def work(self, ns: int) -> None:
        def run() -> None:
            self.now += ns

        self.enqueue(run)

    @contextmanager
    def capturing(self) -> Iterator[list[Op]]:
        self._noted = noted = []
        try:
            yield noted
        finally:
            self._noted = None


class FakeRing:
    """harness.observers.stamps.StampRing on a FakeGpu."""

    def __init__(self, gpu: FakeGpu, rows: int = 4) -> None:
        self.rows = rows
        self.reads = 0
        self._gpu, self._row = gpu, -1
        self._buffer = np.zeros((rows, SLOTS), np.int64)

    def begin(self) -> None:
        def run() -> None:
            self._row += 1
            self._buffer[self._row % self.rows, 0] = self._gpu.now

        self._gpu.enqueue(run)

    def stamp(self, slot: int) -> None:
        def run() -> None:
            self._buffer[self._row % self.rows, slot] = self._gpu.now

        self._gpu.enqueue(run)

    def read(self) -> np.ndarray:
        self.reads += 1
        return self._buffer.copy()

    def tick_ns(self) -> int:
        return 1024

    def floors_ns(self) -> tuple[int, int]:
        return 3000, 2000

    def aligned_ns(self, align: Op, run: Op) -> float:
        align()
        begin = self._gpu.now
        run()
        return self._gpu.now - begin


class HeldGpu:
    """harness.calibration.pairs.Gpu on a FakeGpu; the rounds of `starved` outlast their spin."""

    def __init__(self, gpu: FakeGpu, starved: tuple[int, ...] = ()) -> None:
        self.gpu, self.starved = gpu, starved
        self.spins: list[float] = []

    def spin(self, us: float) -> None:
        self.spins.append(us)

    def mark(self) -> HeldGpu:
        return self

    def record(self) -> None: ...

    def query(self) -> bool:
        return len(self.spins) - 1 in self.starved

    def synchronize(self) -> None: ...

    def capture(self, work: Op) -> Op:
        work()
        with self.gpu.capturing() as ops:
            work()
        return lambda: [op() for op in ops] and None


class FakeEvent:
    def __init__(self, gpu: FakeGpu, external: bool) -> None:
        self.gpu, self.external, self.at = gpu, external, -1

    def record(self) -> None:
        def run() -> None:
            self.at = self.gpu.now

        self.gpu.enqueue(run)

    def synchronize(self) -> None:
        assert self.at >= 0, "waited for an event that never ran"

    def elapsed_time(self, other: FakeEvent) -> float:
        return (other.at - self.at) / 1e6


class FakeEvents:
    """harness.observers.events.EventSource on a FakeGpu."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        self.made: list[FakeEvent] = []

    def make(self, external: bool) -> FakeEvent:
        self.made.append(FakeEvent(self.gpu, external))
        return self.made[-1]

    def calibrate(self) -> tuple[int, int, int]:
        return 500, 5000, 4700


class GpuCommunicator(Communicator):
    """A world of two whose all-reduces take `all_reduce_ns` of the GPU, everything else 7 us."""

    path = "fake"

    def __init__(self, gpu: FakeGpu, all_reduce_ns: int = 5000) -> None:
        super().__init__(rank=0, world=2)
        self.gpu, self.all_reduce_ns = gpu, all_reduce_ns

    def _all_reduce(self, x: torch.Tensor) -> None:
        self.gpu.work(self.all_reduce_ns)

    def _gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        assert (out.shape, out.dtype) == ((self.world, *x.shape), x.dtype)
        self.gpu.work(7000)

    def _broadcast(self, x: torch.Tensor) -> None:
        self.gpu.work(7000)

    def barrier(self) -> None: ...


def info(step: int, bucket: int = 2, mode: str = "eager", phase: Phase = Phase.DECODE) -> StepInfo:
    return StepInfo(step, phase, batch=2, tokens=2, bucket=bucket, samples=2, mode=mode)


def collectives(
    comm: Communicator, rows: int = 2, layers: int = 2, samples: int | None = None
) -> None:
    """Those of a step of a model of width 8 and vocabulary 6; all rows sample unless it is said
    how many do."""
    sampled = rows if samples is None else samples
    comm.all_reduce(torch.zeros(rows, 8), Site.EMBED)
    for _ in range(layers):
        comm.all_reduce(torch.zeros(rows, 8), Site.ATTN_O_PROJ)
        comm.all_reduce(torch.zeros(rows, 8), Site.MLP_DOWN_PROJ)
    comm.gather(torch.zeros(sampled, 3), Site.LM_HEAD)
    comm.broadcast(torch.zeros(sampled, dtype=torch.int64), Site.TOKEN_IDS)


class FakeGraphs:
    """Replays steps as engine.execution.graphs.StepGraphs does: observed graphs are captured when
    their shape is first used, in the middle of a step. One of steps with prompts serves prefill and
    mixed ones, and samples one row."""

    def __init__(self, comm: GpuCommunicator) -> None:
        self._comm = comm
        self._graphs: dict[tuple[Phase, int], list[Op]] = {}

    def step(self, number: int, bucket: int, phase: Phase = Phase.DECODE) -> None:
        comm = self._comm
        step = info(number, bucket, "graph", phase)
        comm.step_begin(step)
        decodes = phase is Phase.DECODE
        key = Phase.DECODE if decodes else Phase.PREFILL, bucket
        if key not in self._graphs:
            captured = info(-1, bucket, "graph", key[0])
            with comm.gpu.capturing() as ops, comm.capturing(captured, True):
                collectives(comm, bucket, samples=bucket if decodes else 1)
            self._graphs[key] = ops
        for op in self._graphs[key]:
            op()
        comm.step_end(step)
