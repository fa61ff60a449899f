"""Pairs of readings round one collective, of ranks that begin it together.

In front of each pair stands one small all-reduce that nobody times (`Communicator.align`): ranks
leave it together, so that what is read holds no waiting for a rank that comes late.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import numpy as np

from harness.observers import clocks
from harness.observers.backlog import CudaHold, Held
from harness.observers.stamps import StampRing

Enqueue = Callable[[], None]
PAIRS = 32  # of one round: behind one spin, or in one graph; even, as sums of a step are
LAUNCHED_ROUNDS, REPLAYED_ROUNDS = 8, 32
SLOTS = 2 + 2 * PAIRS  # as in observers/device.py: a row's begin and end, then the pairs
SPIN_US = 20_000.0  # the host needs some 2 ms for 32 pairs
LONGEST_US = 200_000.0
HOST_PAIRS = 96


class Pairs(Protocol):
    """How a rank times: HostPairs or StampPairs.

    Attributes:
        source: whose clock, as in RankRecord; tick_ns: its step.
    """

    source: str
    tick_ns: int

    def floor_ns(self, mode: str) -> float:
        """What a pair reads round nothing, or round the smallest kernel."""
        ...

    def measure(self, mode: str, align: Enqueue, run: Enqueue) -> np.ndarray:
        """[rounds, pairs] ns as read, NaN in rounds that starved. Every rank must call it with the
        same collective at the same place.

        Each pair is of `align()`, which is not read, and `run()` behind it; they are called by
        turns, an even number of times in each round, a warm-up's included."""
        ...


class HostPairs:
    """The host's clock, where a collective returns when it is done (gloo)."""

    source = "host"

    def __init__(self) -> None:
        self.tick_ns = clocks.tick_ns()
        self._floor_ns = clocks.floor_ns(lambda: self._pair(lambda: None))

    def floor_ns(self, mode: str) -> float:
        return self._floor_ns

    def measure(self, mode: str, align: Enqueue, run: Enqueue) -> np.ndarray:
        assert mode == "eager", mode
        readings = []
        for _ in range(HOST_PAIRS + HOST_PAIRS // 8):
            align()
            readings.append(self._pair(run))
        return np.array([readings[-HOST_PAIRS:]], np.float64)  # the first ones warmed up

    def _pair(self, run: Enqueue) -> int:
        begin = time.perf_counter_ns()
        run()
        return time.perf_counter_ns() - begin


class Gpu(Held, Protocol):
    """What StampPairs needs of a GPU beside its timer: CudaGpu, or a stand-in of a test."""

    def synchronize(self) -> None: ...

    def capture(self, work: Enqueue) -> Enqueue:
        """Runs `work` once, so that whatever it makes when first called exists, and captures it.
        -> what enqueues it as one graph."""
        ...


class StampPairs:
    """Timestamp kernels: launched behind a spin, or captured with the collectives."""

    source = "stamps"

    def __init__(self, gpu: Gpu, ring: StampRing) -> None:
        """ring: of at least REPLAYED_ROUNDS rows and SLOTS slots, not used before."""
        self._gpu, self._ring = gpu, ring
        self.tick_ns = ring.tick_ns()
        launched, replayed = ring.floors_ns()
        self._floors = {"eager": float(launched), "graph": float(replayed)}
        self._begun = 0  # rows of the ring

    def floor_ns(self, mode: str) -> float:
        return self._floors[mode]

    def measure(self, mode: str, align: Enqueue, run: Enqueue) -> np.ndarray:
        def pairs() -> None:
            self._ring.begin()
            for pair in range(PAIRS):
                align()
                self._ring.stamp(2 * pair + 2)
                run()
                self._ring.stamp(2 * pair + 3)

        return self._replayed(pairs) if mode == "graph" else self._launched(pairs)

    def _launched(self, pairs: Enqueue) -> np.ndarray:
        pairs()  # warm: the first call of a size may connect ranks or load a kernel
        self._begun += 1
        self._gpu.synchronize()
        spin_us, starved = SPIN_US, []
        for _ in range(LAUNCHED_ROUNDS):
            self._gpu.spin(spin_us)
            mark = self._gpu.mark()
            mark.record()
            pairs()
            starved.append(mark.query())  # the spin had ended before all was enqueued
            if starved[-1]:
                spin_us = min(2 * spin_us, LONGEST_US)
            self._gpu.synchronize()
        found = self._newest(LAUNCHED_ROUNDS)
        found[starved] = np.nan
        return found

    def _replayed(self, pairs: Enqueue) -> np.ndarray:
        replay = self._gpu.capture(pairs)
        for _ in range(1 + REPLAYED_ROUNDS):  # the first one also uploads it
            replay()
        self._gpu.synchronize()
        self._begun += 2
        return self._newest(REPLAYED_ROUNDS)

    def _newest(self, rounds: int) -> np.ndarray:
        """[rounds, PAIRS] of the last `rounds` rows, which were begun since."""
        self._begun += rounds
        table = self._ring.read()
        rows = table[np.arange(self._begun - rounds, self._begun) % self._ring.rows]
        return (rows[:, 3:SLOTS:2] - rows[:, 2:SLOTS:2]).astype(np.float64)


class CudaGpu(CudaHold):
    """The current GPU."""

    def synchronize(self) -> None:
        import torch

        torch.cuda.synchronize()

    def capture(self, work: Enqueue) -> Enqueue:
        import torch

        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()
            torch.cuda.synchronize()
            # thread_local: NCCL's watchdog thread may query its events meanwhile.
            graph.capture_begin(capture_error_mode="thread_local")
            work()
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        replay: Enqueue = graph.replay
        return replay


def device_pairs(device: str) -> Pairs:
    """Those of a rank's device, "cpu" or "cuda:0"."""
    if device == "cpu":
        return HostPairs()
    from harness.observers.stamp_kernels import Stamps

    return StampPairs(CudaGpu(device), Stamps(REPLAYED_ROUNDS, SLOTS, device))
