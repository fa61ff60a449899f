"""CUDA events round every collective, to show what they do to what they measure.

In a graph they are external event nodes: on two H200s they double a step with NCCL and read five
times what timestamp kernels read. Each replay overwrites them, so they are read before the next
step begins, after waiting for them; the host then never runs ahead of the GPU.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import numpy as np

from engine.comm.types import ObserverContext
from harness.observers.device import BEGIN, END, FIRST, SLOTS, DeviceTimer

PREPARED = FIRST + 2 * 64  # events made before the first step; more are made as steps need them


class Event(Protocol):
    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: Any, /) -> float: ...


class EventSource(Protocol):
    """CudaEvents, or a stand-in of a test."""

    def make(self, external: bool) -> Event: ...

    def calibrate(self) -> tuple[int, int, int]:
        """(tick, floor launched, floor in a graph), ns."""
        ...


class EventObserver(DeviceTimer):
    """Pairs of events, from a pool that every step uses again; one pool more for each graph."""

    source = "events"

    def __init__(
        self,
        context: ObserverContext,
        collectives: bool = True,
        events: EventSource | None = None,
    ) -> None:
        self._events = CudaEvents(context.device) if events is None else events
        self._launched_pool = [self._events.make(False) for _ in range(PREPARED)]
        self._graph_pools: dict[int, list[Event]] = {}
        self._pool, self._external = self._launched_pool, False
        self._begun_ns: list[int] = []
        self._read: list[np.ndarray] = []
        super().__init__(context, collectives)

    def _calibrate(self) -> tuple[int, int, int]:
        return self._events.calibrate()

    def _row_begins(self) -> None:
        self._harvest()
        self._begun_ns.append(time.perf_counter_ns())

    def _begin(self, graph: int | None) -> None:
        self._external = graph is not None
        self._pool = (
            self._launched_pool if graph is None else self._graph_pools.setdefault(graph, [])
        )
        self._mark(BEGIN)

    def _mark(self, slot: int) -> None:
        while len(self._pool) <= slot:
            self._pool.append(self._events.make(self._external))
        self._pool[slot].record()

    def _harvest(self) -> None:
        """Reads the newest step, of which nothing has been read yet."""
        row = len(self._read)
        if row == len(self._begun_ns):
            return
        graph = self._graph_of_row[row]
        if graph is None:
            pool, count = self._launched_pool, self._launched_count(row)
        else:
            pool, count = self._graph_pools[graph], len(self._captured[graph])
        pool[END].synchronize()
        times = np.zeros(SLOTS, np.int64)
        times[BEGIN] = begun = self._begun_ns[row]  # the host's clock places the step
        times[END] = begun + _ns(pool[BEGIN], pool[END])
        for slot in range(FIRST, FIRST + 2 * count, 2):
            times[slot] = begun + _ns(pool[BEGIN], pool[slot])
            times[slot + 1] = times[slot] + _ns(pool[slot], pool[slot + 1])
        self._read.append(times)

    def _launched_count(self, row: int) -> int:
        """Collectives of the newest step."""
        count = 0
        for note in reversed(self._launched):
            if note[0] != row:
                break
            count += 1
        return count

    def _times(self) -> np.ndarray:
        self._harvest()
        return np.array(self._read, np.int64).reshape(len(self._read), SLOTS)


def _ns(begin: Event, end: Event) -> int:
    return round(begin.elapsed_time(end) * 1e6)


class CudaEvents:
    """Events of the current GPU."""

    def __init__(self, device: str) -> None:
        self._device = device

    def make(self, external: bool) -> Event:
        import torch

        event: Event = torch.cuda.Event(enable_timing=True, external=external)
        return event

    def calibrate(self) -> tuple[int, int, int]:
        """From pairs round the smallest kernel: the smallest difference between readings that
        differ, and the mean reading behind a backlog and in a graph."""
        import torch

        from harness.observers.stamp_kernels import SPIN_FLOOR_NS, Nothing, Spin

        nothing, spin = Nothing(self._device), Spin(self._device)
        spin.set_ns(SPIN_FLOOR_NS)

        def pairs(events: list[Event]) -> None:
            for first in range(0, len(events), 2):
                events[first].record()
                nothing()
                events[first + 1].record()

        def read(events: list[Event]) -> list[int]:
            torch.cuda.synchronize()
            return [_ns(*events[first : first + 2]) for first in range(0, len(events), 2)]

        launched = [self.make(False) for _ in range(64)]
        pairs(launched)
        torch.cuda.synchronize()
        readings = []
        for _ in range(8):
            spin()
            pairs(launched)
            readings += read(launched)
        captured = [self.make(True) for _ in range(64)]
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            pairs(captured)
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        replayed = []
        for _ in range(9):
            graph.replay()
            replayed += read(captured)
        replayed = replayed[32:]  # the first replay also uploads the graph
        values = np.unique(readings + replayed)
        tick = int(np.diff(values).min()) if len(values) > 1 else int(values[0])
        return tick, round(float(np.mean(readings))), round(float(np.mean(replayed)))
