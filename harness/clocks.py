"""The host's clock: its tick, what reading it twice costs, and units."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable

NS_PER_US = 1_000
NS_PER_S = 1_000_000_000


def tick_ns(samples: int = 2001, clock: Callable[[], int] = time.perf_counter_ns) -> int:
    """Smallest step seen between readings that differ: the resolution, or what one reading costs
    where that is more."""
    readings = [clock() for _ in range(samples)]
    steps = [b - a for a, b in itertools.pairwise(readings) if b > a]
    if not steps:
        raise ValueError(f"the clock did not move in {samples} readings")
    return min(steps)


def floor_ns(pair: Callable[[], int], samples: int = 1001) -> int:
    """Median of what a before/after pair reads round nothing.

    Args:
        pair: takes both readings with nothing between and returns their difference in ns.
        samples: the first tenth is thrown away: caches are cold then.
    """
    readings = [pair() for _ in range(samples)]
    return int(statistics.median(readings[samples // 10 :]))


def us(ns: float) -> float:
    """Nanoseconds -> microseconds."""
    return ns / NS_PER_US


def seconds(ns: float) -> float:
    """Nanoseconds -> seconds."""
    return ns / NS_PER_S
