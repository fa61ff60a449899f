"""Listeners at the engine's seam, built in each rank: timers, counts, NVTX ranges.

A factory is a small frozen dataclass, because it is pickled to the ranks. The timer stands last in
`factories()`: observers hear `before` in order and `after` in reverse, so nothing of another one
falls between its two readings.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.comm.types import ObserverFactory
from harness.observers.backlog import Backlog, BacklogObserver
from harness.observers.counts import CountObserver, Counts
from harness.observers.events import EventObserver, Events
from harness.observers.host import HostTimer, HostTimerObserver
from harness.observers.nvtx import NVTX_DOMAIN, Nvtx, NvtxObserver, nvtx_missing
from harness.observers.profiler import Profiler, ProfilerObserver
from harness.observers.stamps import Stamp, StampObserver

_TIMERS: dict[str, ObserverFactory] = {"host": HostTimer(), "stamps": Stamp(), "events": Events()}
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
        "counts": Counts(),
        "nvtx": Nvtx(),
        "collectives": _TIMERS[timing],
    }
    return {name: make for name, make in made.items() if name in instrument}


__all__ = [
    "NVTX_DOMAIN",
    "Backlog",
    "BacklogObserver",
    "CountObserver",
    "Counts",
    "EventObserver",
    "Events",
    "HostTimer",
    "HostTimerObserver",
    "Nvtx",
    "NvtxObserver",
    "Profiler",
    "ProfilerObserver",
    "Stamp",
    "StampObserver",
    "factories",
    "nvtx_missing",
]
