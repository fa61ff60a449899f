"""Delays put before the all-reduces of one rank, to see what of them arrives as waiting"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from engine.comm.types import Collective, CollectiveObserver, Kind, ObserverContext, Phase, StepInfo
from harness.observers.records import SkewRecord


class Delay(Protocol):
    """CudaDelay, HostDelay, or a stand-in of a test."""

    def set_us(self, us: float) -> None:
        """Of the delays enqueued from now on; those of a graph included."""

    def __call__(self) -> None:
        """Enqueues one delay."""

    def close_step(self) -> None:
        """Everything enqueued since the last call belongs to one step."""

    def measured(self) -> np.ndarray:
        """[steps, 2]: the sum of the delays of each step as they came out, us, and their number."""


class SkewObserver(CollectiveObserver):
    """Delays `rank` before each all-reduce of its decode steps; the steps take turns through
    `delays_us`, so that each length sees the same drift of the machine.

    Every rank runs the same kernels, the others with a length of 0: a kernel more on one rank alone
    would itself be a skew of 1 to 2 us. It must stand before the timer, whose pair then begins
    after the delay. The length stands in the device's memory, so that one captured graph serves
    all.
    """

    captures = True

    def __init__(
        self,
        context: ObserverContext,
        rank: int,
        delays_us: Sequence[float],
        delay: Delay | None = None,
    ) -> None:
        self._rank, self._mine = context.rank, context.rank == rank
        self._delays = tuple(delays_us)
        self._delay = _delay(context.device) if delay is None else delay
        self._steps: list[int] = []
        self._asked: list[float] = []

    def step_begin(self, step: StepInfo) -> None:
        decodes = step.phase is Phase.DECODE
        asked = self._delays[len(self._steps) % len(self._delays)] if decodes else 0.0
        self._delay.set_us(asked if self._mine else 0.0)
        self._steps.append(step.step)
        self._asked.append(asked)

    def before(self, collective: Collective) -> None:
        if collective.kind is Kind.ALL_REDUCE:
            self._delay()

    def step_end(self, step: StepInfo) -> None:
        self._delay.close_step()

    def result(self) -> SkewRecord:
        sums = self._delay.measured()
        with np.errstate(invalid="ignore"):
            mean = np.where(sums[:, 1] > 0, sums[:, 0] / np.maximum(sums[:, 1], 1), np.nan)
        return SkewRecord(
            self._rank, self._mine, np.array(self._steps, np.int64), np.array(self._asked), mean
        )


def _delay(device: str) -> Delay:
    return HostDelay() if device == "cpu" else CudaDelay(device)


class HostDelay:
    """Keeps the host busy, which on a CPU is what delays a collective."""

    def __init__(self) -> None:
        self._us = 0.0
        self._sum, self._count = 0.0, 0
        self._closed: list[tuple[float, int]] = []

    def set_us(self, us: float) -> None:
        self._us = us

    def __call__(self) -> None:
        begin = time.perf_counter()
        while (taken := (time.perf_counter() - begin) * 1e6) < self._us:
            pass
        self._sum, self._count = self._sum + taken, self._count + 1

    def close_step(self) -> None:
        self._closed.append((self._sum, self._count))
        self._sum, self._count = 0.0, 0

    def measured(self) -> np.ndarray:
        return np.array(self._closed, float).reshape(len(self._closed), 2)


class CudaDelay:
    """A one-thread kernel that spins on the GPU's global timer and adds up how long it did."""

    def __init__(self, device: str) -> None:
        import torch

        from harness.observers.stamp_kernels import Delay as Kernel

        self._torch = torch
        self._kernel = Kernel(device)
        self._closed: list[Any] = []

    def set_us(self, us: float) -> None:
        self._kernel.set_ns(round(us * 1e3))

    def __call__(self) -> None:
        self._kernel()

    def close_step(self) -> None:
        self._closed.append(self._kernel.taken())

    def measured(self) -> np.ndarray:
        if not self._closed:
            return np.zeros((0, 2))
        totals = self._torch.stack(self._closed).cpu().numpy().astype(float)
        each = np.diff(totals, axis=0, prepend=np.zeros((1, 2)))
        each[:, 0] /= 1e3
        return np.asarray(each)


@dataclass(frozen=True)
class Skew:
    """Factory of SkewObserver."""

    rank: int
    delays_us: tuple[float, ...]

    def __call__(self, context: ObserverContext) -> CollectiveObserver:
        return SkewObserver(context, self.rank, self.delays_us)
