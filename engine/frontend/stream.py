"""Stream: an iterator over what comes of requests while they run."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from types import TracebackType

from engine.frontend.call import Call, StreamUpdate
from engine.frontend.client import Client, Event, Token


class Updates:
    """Events of some calls -> their updates, in the order of the events.

    Attributes:
        refused: updates of calls that ended before they began.
    """

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = {r.request_id: call for call in calls for r in call.requests}
        self.refused = [call.last(r) for call in calls if call.finished for r in call.requests]
        self._left = len(self._calls) - len(self.refused)

    @property
    def complete(self) -> bool:
        """Whether every sample has had its last update."""
        return not self._left

    def of(self, event: Event) -> StreamUpdate:
        """Raises the event if it is an error."""
        if isinstance(event, BaseException):
            raise event
        call = self._calls[event.request_id]
        if isinstance(event, Token):
            return call.token(event.request_id, event.token_id)
        self._left -= 1
        return call.last(event)


class Stream:
    """Updates of one or several requests as their tokens come: in order within a sample, samples
    and requests mixed as the engine serves them.

    >>> with llm.stream("Hello") as stream:
    ...     for update in stream:
    ...         print(update.text, end="", flush=True)

    close(), the end of a `with`, and an exception raised while waiting for an update abort what
    remains; of that nothing is heard any more. So does the death of a stream that nothing refers
    to. `break`, or an exception in the body of a loop, does not end a stream that a name or a
    traceback still holds: without `with` its requests run on as long.

    Attributes:
        request_ids: of the requests, in the order of the prompts; for LLM.abort.

    Raises (while iterating):
        EngineDeadError: a rank has raised or died.
    """

    def __init__(self, client: Client, calls: Sequence[Call]) -> None:
        self.request_ids = tuple(call.request_id for call in calls)
        self._client = client
        self._calls = calls
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        try:
            client.open(calls, self._events.put)
            client.submit(calls)
            self._updates = Updates(calls)
        except BaseException:
            self.close()
            raise

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> StreamUpdate:
        try:
            if self._updates.refused:
                return self._updates.refused.pop(0)
            if self._updates.complete or not self._calls:
                raise StopIteration
            return self._updates.of(self._events.get())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Aborts what has not finished; repeatable."""
        calls, self._calls = self._calls, ()
        self._client.drop(calls)

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_calls"):
            self.close()
