"""The host's clock: its tick, and what reading it twice costs."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable


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
