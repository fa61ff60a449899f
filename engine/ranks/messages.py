"""Typed messages between the caller's process and the ranks. Step plans have their own form
(step.StepPlan.to_bytes); these are rare and small beside the requests themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.comm.types import ObserverFactory
from engine.requests.request import Request


@dataclass(frozen=True, slots=True)
class Submit:
    """Requests to queue, in order."""

    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Results:
    """Rank 0 to the caller: requests that ended, and of those that stream and go on, (request id,
    token id) of each new token."""

    finished: tuple[Request, ...]
    tokens: tuple[tuple[str, int], ...] = ()


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
class Ask:
    """A control message and the number that its replies carry, so that replies to a call that was
    interrupted are not taken for another's."""

    ticket: int
    message: Control


@dataclass(frozen=True, slots=True)
class Reply:
    """A rank's answer. `error`: what the handling raised, in a rank that outlives it (tp=1)."""

    rank: int
    ticket: int
    value: Any = None
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class StepFailed:
    """A step raised in a rank that outlives it (tp=1); every request has ended."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class Dead:
    """The ranks are gone and will not come back."""

    error: Exception


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


ToRanks = Submit | Abort | Ask | Close
FromRanks = Results | Reply | StepFailed | Ready | Failed | Dead
