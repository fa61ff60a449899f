"""The range that nsys captures: opened and closed by each rank round one pass"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from engine.comm.types import CollectiveObserver, ObserverContext, StepInfo

SETTLE_S = 0.5  # nsys switches its tracers on in every process by messages, which take milliseconds


@dataclass(frozen=True, slots=True)
class Cuda:
    """What the range is made of; a stand-in of a test has the same functions."""

    start: Callable[[], None]
    stop: Callable[[], None]
    synchronize: Callable[[], None]
    sleep: Callable[[float], None] = time.sleep


class CaptureObserver(CollectiveObserver):
    """Calls cudaProfilerStart before the first step and cudaProfilerStop when it is detached: with
    --capture-range=cudaProfilerApi nsys records what lies between. Each process must call both,
    since nsys records a process from its own call on.

    The ranks meet on both sides of the start, so that none waits in its first collective for the
    other's tracer, and before the stop, so that the first to stop cuts nothing off. It must be
    first of the observers, and is not captured: replays are those of the clean graph.
    """

    def __init__(self, context: ObserverContext, cuda: Cuda | None = None) -> None:
        self._align = context.align
        self._cuda = _cuda() if cuda is None else cuda
        self._steps = 0

    def step_begin(self, step: StepInfo) -> None:
        if self._steps == 0:
            self._meet()
            self._cuda.start()
            self._cuda.sleep(SETTLE_S)
            self._meet()
        self._steps += 1

    def result(self) -> int:
        """Number of steps inside the range."""
        if self._steps:
            self._meet()
            self._cuda.sleep(SETTLE_S)
            self._cuda.stop()
        return self._steps

    def _meet(self) -> None:
        """Returns when all ranks' devices have done what was enqueued before."""
        self._align()
        self._cuda.synchronize()


def _cuda() -> Cuda:
    import torch

    return Cuda(torch.cuda.profiler.start, torch.cuda.profiler.stop, torch.cuda.synchronize)
