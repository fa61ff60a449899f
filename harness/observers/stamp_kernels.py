"""One-thread kernels that read the GPU's global timer, and what the host keeps beside them.

Imported where a GPU is measured, since it needs Triton. A launch from Python costs the host some
10 us through Triton's dispatcher; a compiled kernel called directly costs about half.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

SPIN_FLOOR_NS = 20_000_000  # host time for the launches of the eager floor, with room
PAIRS = 32  # stamp pairs of one floor measurement
REPEATS = 32  # measurements: ticks are coarse, so that the mean needs about a thousand pairs


@triton.jit
def _now():
    """The register globaltimer, ns; it ticks every 1,024 ns on an H200."""
    return globaltimer()


@triton.jit(do_not_specialize=["rows", "slots"])
def _begin(buffer_ptr, row_ptr, rows, slots):
    """Goes to the next row of the ring and stamps its slot 0."""
    row = tl.load(row_ptr) + 1
    tl.store(row_ptr, row)
    tl.store(buffer_ptr + (row % rows) * slots, _now())


@triton.jit(do_not_specialize=["rows", "slots", "slot"])
def _stamp(buffer_ptr, row_ptr, rows, slots, slot):
    row = tl.load(row_ptr)
    tl.store(buffer_ptr + (row % rows) * slots + slot, _now())


@triton.jit
def _spin(ns_ptr):
    """Runs for ns_ptr[0] nanoseconds; leaves the time at which it ended in ns_ptr[1]."""
    now = _now()
    end = now + tl.load(ns_ptr)
    while now < end:
        now = _now()
    tl.store(ns_ptr + 1, now)


@triton.jit
def _delay(ns_ptr):
    """Runs for ns_ptr[0] nanoseconds; adds how long it did to ns_ptr[1], and 1 to ns_ptr[2]."""
    begin = _now()
    now = begin
    end = begin + tl.load(ns_ptr)
    while now < end:
        now = _now()
    tl.store(ns_ptr + 1, tl.load(ns_ptr + 1) + (now - begin))
    tl.store(ns_ptr + 2, tl.load(ns_ptr + 2) + 1)


@triton.jit
def _nothing(out_ptr):
    """The smallest kernel that cannot be left out."""
    tl.store(out_ptr, 0)


@triton.jit
def _readings(out_ptr, COUNT: tl.constexpr):
    for i in range(COUNT):
        tl.store(out_ptr + i, _now())


def _launcher(kernel: Any, *args: Any) -> Callable[..., None]:
    """Runs the kernel once, so that it is built and loaded before any capture, and returns what
    launches it again with arguments of the same types."""
    compiled = kernel[(1,)](*args, num_warps=1)
    if hasattr(compiled, "packed_metadata"):
        launch: Callable[..., None] = compiled[(1, 1, 1)]
        return launch
    return lambda *again: kernel[(1,)](*again)  # Triton's interpreter compiles nothing


class Spin:
    """A kernel that keeps the GPU busy for a time that the host may change between launches."""

    def __init__(self, device: torch.device | str) -> None:
        self._ns = torch.zeros(2, dtype=torch.int64, device=device)
        self._launch = _launcher(_spin, self._ns)

    def set_ns(self, ns: int) -> None:
        """Enqueues the change: spins that are enqueued already keep their time."""
        self._ns[:1].fill_(ns)

    def __call__(self) -> None:
        self._launch(self._ns)


class Delay:
    """A kernel that keeps the GPU busy for a time that the host may change between launches, those
    of a captured graph included, and keeps account of it."""

    def __init__(self, device: torch.device | str) -> None:
        self._ns = torch.zeros(3, dtype=torch.int64, device=device)
        self._launch = _launcher(_delay, self._ns)
        self._ns.zero_()

    def set_ns(self, ns: int) -> None:
        """Enqueues the change: delays that are enqueued already keep their time."""
        self._ns[:1].fill_(ns)

    def taken(self) -> torch.Tensor:
        """[2] int64, enqueued: nanoseconds and number of all delays before it."""
        return self._ns[1:].clone()

    def __call__(self) -> None:
        self._launch(self._ns)


class Nothing:
    """Launches the smallest kernel, round which floors are measured."""

    def __init__(self, device: torch.device | str) -> None:
        self._out = torch.zeros(1, dtype=torch.int64, device=device)
        self._launch = _launcher(_nothing, self._out)

    def __call__(self) -> None:
        self._launch(self._out)


class Stamps:
    """A ring of rows of timer readings on a GPU, one row a step.

    `begin` and `stamp` enqueue a kernel each on the current stream, captured like any other. The
    row stands on the device, so that a graph's replays go through the ring without the host.
    """

    def __init__(self, rows: int, slots: int, device: torch.device | str) -> None:
        self.rows, self.slots = rows, slots
        self._device = device
        self._buffer = torch.zeros(rows, slots, dtype=torch.int64, device=device)
        self._row = torch.zeros(1, dtype=torch.int64, device=device)
        self._nothing = Nothing(device)
        self._args = (self._buffer, self._row, rows, slots)
        self._launch_begin = _launcher(_begin, *self._args)
        self._launch_stamp = _launcher(_stamp, *self._args, 1)
        self._restart()

    def begin(self) -> None:
        """Enqueues: next row, its slot 0 stamped."""
        self._launch_begin(*self._args)

    def stamp(self, slot: int) -> None:
        """Enqueues a stamp of the current row's slot."""
        self._launch_stamp(*self._args, slot)

    def read(self) -> Any:
        """numpy [rows, slots], after waiting for all enqueued work."""
        if self._buffer.is_cuda:
            torch.cuda.synchronize(self._buffer.device)
        return self._buffer.cpu().numpy().copy()

    def tick_ns(self, count: int = 4096) -> int:
        """Smallest difference of consecutive readings that differ.

        Raises:
            RuntimeError: the timer did not move.
        """
        out = torch.zeros(count, dtype=torch.int64, device=self._device)
        _readings[(1,)](out, COUNT=count, num_warps=1)
        steps = out.diff()
        steps = steps[steps > 0]
        if not len(steps):
            raise RuntimeError(f"the GPU's timer did not move in {count} readings")
        return int(steps.min())

    def floors_ns(self) -> tuple[int, int]:
        """What a pair of stamps reads round the smallest kernel: (launched behind a backlog, inside
        a CUDA graph), means over about a thousand pairs, since single readings are whole ticks."""
        spin = Spin(self._device)
        spin.set_ns(SPIN_FLOOR_NS)
        self._pairs()  # warm
        torch.cuda.synchronize()
        launched = []
        for _ in range(4):
            spin()
            self._pairs()
            launched.append(self._mean())
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # thread_local: NCCL's watchdog thread may query its events meanwhile.
            graph.capture_begin(capture_error_mode="thread_local")
            self._pairs()
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        graph.replay()  # the first one also uploads it
        torch.cuda.synchronize()
        replayed = []
        for _ in range(REPEATS):
            graph.replay()
            replayed.append(self._mean())
        self._restart()
        return round(sum(launched) / len(launched)), round(sum(replayed) / len(replayed))

    def aligned_ns(self, align: Callable[[], None], run: Callable[[], None]) -> float:
        """What a pair of stamps reads round `run` behind `align`, launched behind a backlog: the
        mean of 4 x PAIRS readings, floor included."""
        spin = Spin(self._device)
        spin.set_ns(SPIN_FLOOR_NS)

        def pairs() -> None:
            self.begin()
            for pair in range(PAIRS):
                align()
                self.stamp(2 * pair + 2)
                run()
                self.stamp(2 * pair + 3)

        pairs()  # warm
        means = []
        for _ in range(4):
            spin()
            pairs()
            means.append(self._mean())
        self._restart()
        return sum(means) / len(means)

    def _pairs(self) -> None:
        self.begin()
        for pair in range(PAIRS):
            self.stamp(2 * pair + 2)
            self._nothing()
            self.stamp(2 * pair + 3)

    def _mean(self) -> float:
        """Of the newest row's pairs."""
        table = self.read()
        row = table[int(self._row.item()) % self.rows]
        return float((row[3 : 2 * PAIRS + 3 : 2] - row[2 : 2 * PAIRS + 2 : 2]).mean())

    def _restart(self) -> None:
        self._row.fill_(-1)
