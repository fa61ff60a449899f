"""Typed messages between the caller's process and the ranks. Step plans have their own form
(step.StepPlan.to_bytes); these are rare and small beside the requests themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.comm.types import ObserverFactory
from engine.request import Request


@dataclass(frozen=True, slots=True)
class Submit:
    """Requests to queue, in order."""

    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    request_id: str


@dataclass(frozen=True, slots=True)
class Finished:
    """Rank 0 to the caller: requests that ended."""

    requests: tuple[Request, ...]


# What every rank does between two steps, each with one reply per rank.
@dataclass(frozen=True, slots=True)
class Attach:
    factories: tuple[ObserverFactory, ...]


@dataclass(frozen=True, slots=True)
class Detach: ...


@dataclass(frozen=True, slots=True)
class DrainSteps: ...


@dataclass(frozen=True, slots=True)
class Counters: ...


@dataclass(frozen=True, slots=True)
class Memory: ...


@dataclass(frozen=True, slots=True)
class Captures: ...


@dataclass(frozen=True, slots=True)
class ResetPrefixCache: ...


@dataclass(frozen=True, slots=True)
class Close: ...


Control = Attach | Detach | DrainSteps | Counters | Memory | Captures | ResetPrefixCache


@dataclass(frozen=True, slots=True)
class Reply:
    """A rank's answer to a control message."""

    rank: int
    value: Any


@dataclass(frozen=True, slots=True)
class Ready:
    """A rank has loaded, allocated and warmed up."""

    rank: int
    startup: dict[str, float | None]
    effective: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Failed:
    """A rank raised; it ends after sending this. `at_s` is perf_counter, comparable between ranks,
    so that the first failure is told from those that follow from it."""

    rank: int
    traceback: str
    at_s: float
    # Class name and message of an error that the user can mend (configuration, checkpoint).
    user_error: tuple[str, str] | None = None
