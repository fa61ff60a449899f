"""Work that the GPU has before it, so that launches cost nothing in what is timed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from engine.comm.types import Collective, CollectiveObserver, ObserverContext, Site, StepInfo
from harness.observers.records import BacklogRecord

LAYERS_EAGER, LAYERS_COMPILED = 8, 24
"""Decoder layers that are enqueued behind one spin. The GPU's queue holds about 1,024 launches, at
which the host stops until the spin ends; a layer has some 20, compiled some 8, with stamps."""
LONGEST_US = 200_000.0


class Mark(Protocol):
    def record(self) -> None: ...

    def query(self) -> bool: ...


class Held(Protocol):
    """What holds a GPU back: CudaHold, or a stand-in of a test."""

    def spin(self, us: float) -> None: ...

    def mark(self) -> Mark: ...


class BacklogObserver(CollectiveObserver):
    """Enqueues a timed spin and one unheard all-reduce before each launched step, so that ranks
    start together and the host runs ahead; a step of many layers is cut after every few of them.

    It must be first of the observers: what it enqueues then lies outside the others' readings.
    A part of a step is `starved` if its spin had ended before the host had enqueued all of it;
    the spin of the steps after it is twice as long, up to 200 ms. Replayed steps need none.

    Args:
        spin_us: first length; layers: behind one spin, None: 8 in eager mode, 24 compiled.
    """

    def __init__(
        self,
        context: ObserverContext,
        spin_us: float,
        layers: int | None = None,
        held: Held | None = None,
    ) -> None:
        self._rank, self._align = context.rank, context.align
        self._spin_us, self._layers = spin_us, layers
        self._held: Held = CudaHold(context.device) if held is None else held
        self._mark: Mark | None = None
        self._starved = False
        self._layer, self._cut = 0, 0
        self._steps: list[int] = []
        self._of_step: list[bool] = []

    def step_begin(self, step: StepInfo) -> None:
        if step.replayed:
            return
        compiled = step.mode.startswith("compiled")
        self._cut = self._layers or (LAYERS_COMPILED if compiled else LAYERS_EAGER)
        self._layer, self._starved = 0, False
        self._hold()

    def after(self, collective: Collective) -> None:
        # The last thing of a layer. Observers hear `after` in reverse, so the first one's comes
        # behind all readings.
        if self._mark is not None and collective.site == Site.MLP_DOWN_PROJ:
            self._layer += 1
            if self._layer % self._cut == 0:
                self._check()
                self._hold()

    def step_end(self, step: StepInfo) -> None:
        if step.replayed:
            return
        self._check()
        self._mark = None
        self._steps.append(step.step)
        self._of_step.append(self._starved)
        if self._starved:
            self._spin_us = min(2 * self._spin_us, LONGEST_US)

    def result(self) -> BacklogRecord:
        steps, starved = np.array(self._steps, np.int64), np.array(self._of_step, bool)
        return BacklogRecord(self._rank, steps, starved, self._spin_us)

    def _hold(self) -> None:
        self._held.spin(self._spin_us)
        self._align()
        self._mark = self._held.mark()
        self._mark.record()

    def _check(self) -> None:
        assert self._mark is not None
        self._starved |= self._mark.query()


class CudaHold:
    """Spins on the current GPU."""

    def __init__(self, device: str) -> None:
        import torch

        from harness.observers.stamp_kernels import Spin

        self._event = torch.cuda.Event
        self._spin = Spin(device)
        self._us = 0.0

    def spin(self, us: float) -> None:
        if us != self._us:
            self._spin.set_ns(round(us * 1e3))
            self._us = us
        self._spin()

    def mark(self) -> Mark:
        mark: Mark = self._event()
        return mark


@dataclass(frozen=True)
class Backlog:
    """Factory of BacklogObserver."""

    spin_us: float
    layers: int | None = None

    def __call__(self, context: ObserverContext) -> CollectiveObserver:
        return BacklogObserver(context, self.spin_us, self.layers)
