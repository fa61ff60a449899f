"""N ranks as threads of one process, so that a tensor-parallel model runs inside one test."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from engine.comm import (
    Collective,
    CollectiveObserver,
    Communicator,
    SoloCommunicator,
    StepInfo,
)

T = TypeVar("T")

_TIMEOUT_S = 60.0


class Meeting:
    """Where the ranks of one world exchange tensors: all show one, all look, all leave."""

    def __init__(self, world: int) -> None:
        self.barrier = threading.Barrier(world, timeout=_TIMEOUT_S)
        self.shown: list[torch.Tensor] = [torch.empty(0)] * world

    def exchange(self, rank: int, x: torch.Tensor, use: Callable[[list[torch.Tensor]], T]) -> T:
        self.shown[rank] = x.clone()
        self.barrier.wait()
        result = use(self.shown)
        self.barrier.wait()  # nobody shows the next tensor while another still looks
        return result


class ThreadCommunicator(Communicator):
    """One rank's end; sums in rank order, so every rank gets the same bits."""

    path = "threads"

    def __init__(self, rank: int, world: int, meeting: Meeting) -> None:
        super().__init__(rank, world)
        self._meeting = meeting

    def _all_reduce(self, x: torch.Tensor) -> None:
        x.copy_(self._meeting.exchange(self.rank, x, lambda all_x: torch.stack(all_x).sum(0)))

    def _gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        shards = self._meeting.exchange(self.rank, x, torch.stack)
        if self.rank == 0:
            out.copy_(shards)

    def _broadcast(self, x: torch.Tensor) -> None:
        x.copy_(self._meeting.exchange(self.rank, x, lambda all_x: all_x[0]))

    def barrier(self) -> None:
        self._meeting.barrier.wait()


def run_ranks(world: int, run: Callable[[Communicator], T]) -> list[T]:
    """`run(comm)` on every rank at once; the results by rank. The first error of a rank is raised,
    and the others, which would wait for it, are released."""
    meeting = Meeting(world)
    comms: list[Communicator] = (
        [SoloCommunicator()]
        if world == 1
        else [ThreadCommunicator(rank, world, meeting) for rank in range(world)]
    )

    def on_rank(comm: Communicator) -> T:
        try:
            with torch.inference_mode():  # this mode belongs to the thread
                return run(comm)
        except BaseException:
            meeting.barrier.abort()
            raise

    try:
        with ThreadPoolExecutor(world) as pool:
            futures = [pool.submit(on_rank, comm) for comm in comms]
        errors = [error for f in futures if (error := f.exception()) is not None]
        # A rank that was only released is not the one that failed.
        errors.sort(key=lambda e: isinstance(e, threading.BrokenBarrierError))
        if errors:
            raise errors[0]
        return [f.result() for f in futures]
    finally:
        for comm in comms:
            comm.close()


@dataclass
class Recorder(CollectiveObserver):
    """An observer that keeps what it heard."""

    collectives: list[Collective] = field(default_factory=list)
    steps: list[StepInfo] = field(default_factory=list)
    open: int = 0

    def step_begin(self, step: StepInfo) -> None:
        self.steps.append(step)

    def step_end(self, step: StepInfo) -> None:
        assert step == self.steps[-1]

    def before(self, collective: Collective) -> None:
        self.open += 1
        self.collectives.append(collective)

    def after(self, collective: Collective) -> None:
        self.open -= 1
        assert collective == self.collectives[-1]

    def result(self) -> Any:
        return self.collectives
