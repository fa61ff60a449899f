"""Client: takes requests to the engine, and what comes back to whoever waits for it."""

from __future__ import annotations

import copy
import itertools
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engine.frontend.call import Call
from engine.ranks.messages import (
    Abort,
    Ask,
    Control,
    Dead,
    FromRanks,
    Reply,
    Results,
    StepFailed,
    Submit,
    ToRanks,
)
from engine.requests.request import FinishReason, Request


@dataclass(frozen=True, slots=True)
class Token:
    """The newest token of a request that streams and goes on."""

    request_id: str
    token_id: int


Event = Token | Request | BaseException  # a Request: it has ended
Sink = Callable[[Event], None]  # must not block: it is called on the engine's thread


class Ranks(Protocol):
    """solo_rank.SoloRank or group.RankGroup."""

    send: Callable[[ToRanks], None]
    world: int
    startup: dict[str, float | None]
    effective: dict[str, Any]

    def close(self) -> None: ...


class Client:
    """Between any number of callers, in any thread, and the ranks of one engine, which live as long
    as it does: a stream keeps its engine alive by holding on to this.

    Args:
        start: starts the ranks, given what they are to call with all that they send.

    Attributes:
        ranks: as started.

    Raises (every method but drop and close):
        EngineDeadError, RuntimeError: the engine has died, or was closed. Whoever waits hears it.
    """

    def __init__(self, start: Callable[[Callable[[FromRanks], None]], Ranks]) -> None:
        # Reentrant: the garbage collector may drop a stream while its thread holds the lock.
        self._lock = threading.RLock()
        self._calls: dict[str, Call] = {}  # by the caller's id, while a sample of it is unfinished
        self._sinks: dict[str, tuple[Call, Sink]] = {}  # by request id
        self._replies: dict[int, queue.SimpleQueue[Reply | BaseException]] = {}
        self._tickets = itertools.count()
        self._error: BaseException | None = None
        deliver = weakref.WeakMethod(self._deliver)  # their threads must not keep this alive

        def hear(message: FromRanks) -> None:
            found = deliver()
            if found is not None:
                found(message)

        self.ranks = start(hear)
        self._send = self.ranks.send

    # -- callers ----------------------------------------------------------------------------------

    def open(self, calls: Sequence[Call], sink: Sink) -> None:
        """Lets `sink` hear of these calls. One whose id is in use is refused, which its requests
        say; so is one that was refused before."""
        with self._lock:
            self._check()
            for call in calls:
                if call.finished:
                    continue
                if call.request_id in self._calls:
                    call.refuse(
                        f"request_id={call.request_id!r} is in use: give each request an id of "
                        "its own"
                    )
                else:
                    self._calls[call.request_id] = call
                    self._sinks.update({r.request_id: (call, sink) for r in call.requests})

    def submit(self, calls: Sequence[Call]) -> None:
        """Sends the requests of these calls, in order, but for those that have ended already or
        were given up with a step that failed."""
        with self._lock:
            self._check()
            requests = [r for c in calls for r in c.requests if r.request_id in self._sinks]
            for call in calls:
                call.sent = True
            if requests:
                self._send(Submit(tuple(requests)))

    def abort(self, request_id: str) -> None:
        """Ends all samples of a caller's request; they come back as aborted with what they have.
        Unknown and finished ids are ignored."""
        with self._lock:
            self._check()
            call = self._calls.get(request_id)
            if call is None:
                return
            if call.sent:
                self._send(Abort(tuple(r.request_id for r in call.requests)))
                return
            for request in call.requests:  # it has not arrived yet: the engine knows nothing of it
                request.finish_reason = FinishReason.ABORT
                request.finished_s = time.perf_counter()
                self._finish(request)

    def drop(self, calls: Sequence[Call]) -> None:
        """Ends what is left of these calls; nobody hears of it."""
        with self._lock:
            left = []
            for call in calls:
                ids = [r.request_id for r in call.requests]
                left += [i for i in ids if self._sinks.pop(i, None) is not None]
                self._forget(call)  # also one that an interrupt left without sinks
            if left and self._error is None:
                self._send(Abort(tuple(left)))

    def control(self, message: Control) -> list[Any]:
        """Every rank acts on `message` between the same two steps; -> replies in order of rank.
        What rank 0 raises while acting, at tp=1, is raised here."""
        replies: queue.SimpleQueue[Reply | BaseException] = queue.SimpleQueue()
        with self._lock:
            self._check()
            ticket = next(self._tickets)
            self._replies[ticket] = replies
        try:
            self._send(Ask(ticket, message))
            values: dict[int, Any] = {}
            while len(values) < self.ranks.world:
                reply = replies.get()
                error = reply.error if isinstance(reply, Reply) else reply
                if error is not None:
                    raise error  # nobody else has it
                assert isinstance(reply, Reply)
                values[reply.rank] = reply.value
        finally:
            self._replies.pop(ticket, None)
        return [values[rank] for rank in range(self.ranks.world)]

    def close(self) -> None:
        """Ends the ranks; repeatable. Whoever waits, or calls later, hears it."""
        self._fail(RuntimeError("the engine is closed"), for_good=True)
        self.ranks.close()

    # -- the engine's thread ----------------------------------------------------------------------

    def _deliver(self, message: FromRanks) -> None:
        match message:
            case Results(finished, tokens):
                with self._lock:
                    for request_id, token_id in tokens:
                        found = self._sinks.get(request_id)
                        if found is not None:  # else its caller has left
                            found[1](Token(request_id, token_id))
                    for request in finished:
                        self._finish(request)
            case Reply(ticket=ticket):
                replies = self._replies.get(ticket)
                if replies is not None:
                    replies.put(message)
            case StepFailed(error):
                self._fail(error, for_good=False)
            case Dead(error):
                self._fail(error, for_good=True)

    def _finish(self, request: Request) -> None:
        found = self._sinks.pop(request.request_id, None)
        if found is None:
            return
        call, sink = found
        if not any(r.request_id in self._sinks for r in call.requests):
            self._forget(call)
        sink(request)

    def _forget(self, call: Call) -> None:
        if self._calls.get(call.request_id) is call:  # not another's of the same id
            self._calls.pop(call.request_id, None)  # the collector may have come in between

    def _fail(self, error: BaseException, for_good: bool) -> None:
        with self._lock:
            if self._error is not None:
                return
            if for_good:
                self._error = error
                for replies in list(self._replies.values()):
                    replies.put(_copy(error))
            left, self._sinks = self._sinks, {}
            self._calls.clear()
            if left and not for_good:
                # The engine has ended what it had, but not what still lies in its inbox.
                self._send(Abort(tuple(left)))
            for _, sink in left.values():
                sink(_copy(error))

    def _check(self) -> None:
        if self._error is not None:
            raise _copy(self._error)


def _copy(error: BaseException) -> BaseException:
    """One for each who raises it: raising adds the raiser's frames to an exception's traceback,
    and threads would write into the same one. The frames that it has already stay."""
    try:
        own = copy.copy(error)
    except Exception:  # an observer's, say, whose class does not copy: all raise the same
        return error
    own.__cause__, own.__context__ = error.__cause__, error.__context__
    own.__suppress_context__ = error.__suppress_context__
    return own.with_traceback(error.__traceback__)
