"""Collectives counted, to hold against what was timed."""

from __future__ import annotations

from engine.comm.types import Collective, CollectiveObserver, ObserverContext, StepInfo
from harness.observers.records import CountRecord


class CountObserver(CollectiveObserver):
    """Counts collectives and their bytes, step by step."""

    def __init__(self, context: ObserverContext) -> None:
        self._record = CountRecord(context.rank, context.world)
        self._step: dict[tuple[str, str], list[int]] = {}

    def step_begin(self, step: StepInfo) -> None:
        self._step = self._record.steps.setdefault(step.step, {})

    def before(self, collective: Collective) -> None:
        key = (collective.kind.label, collective.site.label)
        entry = self._step.setdefault(key, [0, 0])
        entry[0] += 1
        entry[1] += collective.bytes

    def result(self) -> CountRecord:
        return self._record
