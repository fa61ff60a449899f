"""Timestamp kernels round every collective: launched, or captured in a graph.

They cost the GPU some 1.4 us each in a graph (H200), where a pair of event nodes doubles a step
with NCCL. Launched from Python each costs the host some 5 us more, which a span holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from engine.comm.types import CollectiveObserver, Kind, ObserverContext
from harness.observers.device import SLOTS, DeviceTimer
from harness.observers.records import RankRecord

RING = 4096  # steps between two reads of the device's buffer: 17 MB
REHEARSED = 16  # sizes of rooted collectives that are rehearsed, the most frequent ones


class StampRing(Protocol):
    """harness.observers.stamp_kernels.Stamps, or a stand-in of a test."""

    rows: int

    def begin(self) -> None: ...

    def stamp(self, slot: int) -> None: ...

    def read(self) -> np.ndarray: ...

    def tick_ns(self) -> int: ...

    def floors_ns(self) -> tuple[int, int]: ...

    def aligned_ns(self, align: Callable[[], None], run: Callable[[], None]) -> float: ...


class StampObserver(DeviceTimer):
    """Stamps begin and end of each step and, with `collectives`, both sides of each collective.

    Without it a step has two kernels of one thread more than a clean one: some 2 us of its own
    device time, and what the host pays for two launches where it is not a replay.

    When the ring is full it is read at the begin of a step, between steps: the host waits for the
    GPU there, once in 4,096 steps.
    """

    source = "stamps"

    def __init__(
        self, context: ObserverContext, collectives: bool = True, ring: StampRing | None = None
    ) -> None:
        if ring is None:
            from harness.observers.stamp_kernels import Stamps

            ring = Stamps(RING, SLOTS, context.device)
        self._ring = ring
        self._read: list[np.ndarray] = []
        self._unread = 0
        self._context = context
        super().__init__(context, collectives)

    def result(self) -> RankRecord:
        record = super().result()
        record.rooted_ns = self._rehearsed(record)
        return record

    def _rehearsed(self, record: RankRecord) -> dict[tuple[int, int], float]:
        """Rooted collectives once more, all ranks beginning together. In a step a sender may have
        sent before the others arrive, so that the shortest time of a rank is no transfer time.
        Every rank recorded the same collectives, hence takes the same ones in the same order."""
        rows = record.collectives
        rooted = rows[rows["kind"] != Kind.ALL_REDUCE]
        seen = Counter(rooted[["kind", "bytes", "dtype"]].tolist())
        chosen = sorted(seen, key=lambda key: (-seen[key], key))[:REHEARSED]
        found = {}
        for kind, size, dtype in chosen:
            run = self._context.rehearse(Kind(kind), size, record.dtypes[dtype])
            found[kind, size] = self._ring.aligned_ns(self._context.align, run) - self.floor_ns
        return found

    def _calibrate(self) -> tuple[int, int, int]:
        launched, replayed = self._ring.floors_ns()
        return self._ring.tick_ns(), launched, replayed

    def _row_begins(self) -> None:
        if self._unread == self._ring.rows:
            self._drain()
        self._unread += 1

    def _begin(self, graph: int | None) -> None:
        self._ring.begin()

    def _mark(self, slot: int) -> None:
        self._ring.stamp(slot)

    def _drain(self) -> None:
        # It is full, or this is the end: the ring's first row is always the first unread one.
        self._read.append(self._ring.read()[: self._unread].copy())
        self._unread = 0

    def _times(self) -> np.ndarray:
        if self._unread:
            self._drain()
        return np.concatenate([*self._read, np.zeros((0, SLOTS), np.int64)])


@dataclass(frozen=True)
class Stamp:
    """Factory of StampObserver; collectives=False stamps the steps alone."""

    collectives: bool = True

    def __call__(self, context: ObserverContext) -> CollectiveObserver:
        return StampObserver(context, self.collectives)
