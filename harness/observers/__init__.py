"""Listeners at the engine's seam, built in each rank: timers, counts, NVTX ranges.

An observer's class is its factory, pickled to the ranks by name; where it takes settings, a small
frozen dataclass holds them. The timer stands last in `factories()`: observers hear `before` in
order and `after` in reverse, so nothing of another one falls between its two readings.

What they hand over stands in records, which whoever reads it imports from there.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.comm.types import ObserverFactory
from harness.observers.backlog import Backlog, BacklogObserver
from harness.observers.capture import CaptureObserver
from harness.observers.counts import CountObserver
from harness.observers.events import EventObserver
from harness.observers.host import HostTimerObserver
from harness.observers.nvtx import NVTX_DOMAIN, NvtxObserver, nvtx_missing
from harness.observers.profiler import ProfilerObserver
from harness.observers.skew import Skew, SkewObserver
from harness.observers.stamps import Stamp, StampObserver

_TIMERS: dict[str, ObserverFactory] = {
    "host": HostTimerObserver,
    "stamps": Stamp(),
    "events": EventObserver,
}
_INSTRUMENTS = ("counts", "nvtx", "collectives")


def factories(instrument: Sequence[str], timing: str = "host") -> dict[str, ObserverFactory]:
    """The factories of the named instruments, in the order to attach them: the timer last.

    Raises:
        ValueError: an unknown instrument.
    """
    unknown = sorted(set(instrument) - set(_INSTRUMENTS))
    if unknown:
        raise ValueError(f"instrument={unknown}: choose among {', '.join(_INSTRUMENTS)}")
    made: dict[str, ObserverFactory] = {
        "counts": CountObserver,
        "nvtx": NvtxObserver,
        "collectives": _TIMERS[timing],
    }
    return {name: make for name, make in made.items() if name in instrument}


__all__ = [
    "NVTX_DOMAIN",
    "Backlog",
    "BacklogObserver",
    "CaptureObserver",
    "CountObserver",
    "EventObserver",
    "HostTimerObserver",
    "NvtxObserver",
    "ProfilerObserver",
    "Skew",
    "SkewObserver",
    "Stamp",
    "StampObserver",
    "factories",
    "nvtx_missing",
]
