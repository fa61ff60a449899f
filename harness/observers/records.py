"""What one rank hands over after an instrumented pass: rows in arrays, names beside them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from engine.comm.types import Phase

PHASES = tuple(phase.value for phase in Phase)  # prefill, decode, mixed: the codes 0, 1, 2
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4}
PREFILL, DECODE = PHASES.index("prefill"), PHASES.index("decode")
PHASE_CODES = {phase: code for code, phase in enumerate(PHASES)}

STEP_DTYPE = np.dtype(
    [
        ("step", "i8"),
        ("phase", "u1"),
        ("batch", "i4"),
        ("tokens", "i4"),
        ("bucket", "i4"),
        ("samples", "i4"),
        ("mode", "u1"),
        ("begin_ns", "i8"),
        ("end_ns", "i8"),
    ]
)

COLLECTIVE_DTYPE = np.dtype(
    [
        ("step", "i8"),
        ("ordinal", "i4"),
        ("kind", "u1"),
        ("site", "u1"),
        ("bytes", "i8"),
        ("dtype", "u1"),
        ("path", "u1"),
        ("before_ns", "i8"),
        ("after_ns", "i8"),
    ]
)

SPLIT_DTYPE = np.dtype(
    [
        ("kernels", "i8"),
        ("extent_ns", "i8"),
        ("compute_ns", "i8"),
        ("communication_ns", "i8"),
        ("idle_ns", "i8"),
        ("beside_ns", "i8"),
    ]
)
"""Of one step: number of kernels; first begin to last end; sums of the kernels that compute and of
those that communicate; time in which none runs, and how much of it lies right before or after a
communication kernel."""


class Rows:
    """A structured array that grows by doubling, so that appending allocates rarely."""

    def __init__(self, dtype: np.dtype[Any], capacity: int = 4096) -> None:
        self.array = np.zeros(capacity, dtype)
        self.count = 0

    def append(self, row: tuple[int, ...]) -> int:
        """Returns the row's index."""
        if self.count == len(self.array):
            self.array = np.concatenate([self.array, np.zeros_like(self.array)])
        index = self.count
        self.array[index] = row
        self.count += 1
        return index

    def taken(self) -> np.ndarray:
        return self.array[: self.count].copy()


class Names:
    """Small codes for repeated strings."""

    def __init__(self) -> None:
        self._codes: dict[str, int] = {}

    def code(self, name: str) -> int:
        return self._codes.setdefault(name, len(self._codes))

    def tuple(self) -> tuple[str, ...]:
        return tuple(self._codes)


@dataclass(slots=True)
class RankRecord:
    """One rank's steps and collectives with their times.

    Attributes:
        steps: STEP_DTYPE; `mode` is an index into `modes`.
        collectives: COLLECTIVE_DTYPE; kind and site are the engine's numbers, dtype and path
            indices into `dtypes` and `paths`; after_ns is 0 where the collective did not return.
        floor_ns: what the same pair reads round nothing (host: median) or round the smallest kernel
            (stamps, events: mean); tick_ns: the clock's step.
        source: whose clock: host, stamps, events, cupti. Times of stamps are the GPU's own and
            comparable within one rank only.
        graph_floor_ns: the floor inside a CUDA graph, for replayed steps; None: floor_ns.
        rooted_ns: (kind, bytes) of gathers and broadcasts -> what the same collective took on this
            rank when all ranks began it together, less the floor; what is not there was not tried.
    """

    rank: int
    world: int
    steps: np.ndarray
    collectives: np.ndarray
    floor_ns: int
    tick_ns: int
    modes: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    source: str = "host"
    graph_floor_ns: int | None = None
    rooted_ns: dict[tuple[int, int], float] = field(default_factory=dict)

    def of_steps(self, numbers: np.ndarray) -> RankRecord:
        """A copy with the steps of these numbers alone."""
        return replace(
            self,
            steps=self.steps[np.isin(self.steps["step"], numbers)],
            collectives=self.collectives[np.isin(self.collectives["step"], numbers)],
        )


@dataclass(slots=True)
class BacklogRecord:
    """Whether one rank's host kept ahead of its GPU.

    Attributes:
        steps: [S] numbers; starved: [S] bool: the backlog of one of its parts had ended before the
            host had enqueued all of it.
        spin_us: length of the backlog at the end: it grows where it was too short.
    """

    rank: int
    steps: np.ndarray
    starved: np.ndarray
    spin_us: float


@dataclass(slots=True)
class SkewRecord:
    """Delays that were put before the all-reduces of a rank.

    Attributes:
        delayed: whether this rank is the one.
        steps: [S] numbers; asked_us: [S] of the delayed rank, the same on all ranks;
            taken_us: [S] mean of this rank's own delays as they came out, NaN where it had none.
    """

    rank: int
    delayed: bool
    steps: np.ndarray
    asked_us: np.ndarray
    taken_us: np.ndarray


@dataclass(slots=True)
class ProfileRecord:
    """What CUPTI saw on one rank.

    Attributes:
        steps: [S] STEP_DTYPE of the profiled steps, times 0.
        splits: [S] SPLIT_DTYPE of all their kernels.
        names, begin_ns, duration_ns: [K] of the communication kernels, in the order in which they
            began.
        error: why there is nothing; None if there is.
    """

    rank: int
    world: int
    steps: np.ndarray
    modes: tuple[str, ...]
    names: list[str]
    begin_ns: np.ndarray
    duration_ns: np.ndarray
    splits: np.ndarray
    error: str | None = None


@dataclass(slots=True)
class CountRecord:
    """One rank's counts.

    Attributes:
        steps: {step: {(kind, site): [count, bytes]}} with the engine's labels; a step without
            collectives is there with an empty dict.
    """

    rank: int
    world: int
    steps: dict[int, dict[tuple[str, str], list[int]]] = field(default_factory=dict)
