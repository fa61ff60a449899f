"""AsyncLLM: the engine for asyncio."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from engine.config import EngineConfig
from engine.errors import RequestError
from engine.frontend.call import Call, StreamUpdate
from engine.frontend.client import Client, Event
from engine.frontend.intake import Prompt
from engine.frontend.stream import Updates
from engine.llm import LLM
from engine.requests.request import Request, RequestOutput
from engine.requests.sampling_params import SamplingParams


class AsyncLLM:
    """An engine whose requests are awaited. What any number of tasks ask is served together.

    >>> async with AsyncLLM("path/to/qwen3", tp=2) as llm:
    ...     async with llm.stream("Hello") as stream:
    ...         async for update in stream:
    ...             print(update.text, end="")

    Steps run where they run for LLM: at tp=1 on the engine's own thread, else in the ranks. A task
    that is cancelled while it awaits an output or an update aborts its request.

    Args:
        as of LLM; checked now, but nothing is loaded before `start`.

    Raises:
        ConfigError: now or in `start`; CheckpointError: in `start`.
        EngineDeadError: in every task that waits, and from any later call, once a rank has raised
            or died.
    """

    def __init__(self, model: str | Path | EngineConfig, **options: Any) -> None:
        self.config = LLM.configuration(model, **options)
        self._llm: LLM | None = None
        self._loading = threading.Lock()  # not asyncio's, which belongs to one loop

    @property
    def llm(self) -> LLM:
        """The engine, for what has no async form (counters, memory, attach, ...): call those in a
        thread, `await asyncio.to_thread(llm.llm.counters)`, since they wait for a step to end."""
        if self._llm is None:
            raise RuntimeError("the engine was not started: use `async with`, or await start()")
        return self._llm

    async def start(self) -> None:
        """Loads the model and, if the folder has one, its tokenizer, in a thread; repeatable, by
        several tasks at once too, and one that was cancelled may be called again."""
        await asyncio.to_thread(self._load)

    def _load(self) -> None:
        with self._loading:
            if self._llm is not None:
                return
            llm = LLM(self.config)
            with suppress(RequestError):  # without one, texts are refused, each by itself
                _ = llm.tokenizer
            self._llm = llm

    async def close(self) -> None:
        """Ends the engine, once it has loaded if it is about to; repeatable. Tasks that still wait
        hear a RuntimeError."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        with self._loading:
            if self._llm is not None:
                self._llm.close()

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
    ) -> RequestOutput:
        """Runs one prompt to its end. As of LLM.generate: what cannot be served comes back with
        finish_reason "error"."""
        call = self._call(prompt, params, request_id, streams=False)
        events = _Events(self.llm.client, call)
        try:
            while not call.finished:
                event = await events.next()
                assert isinstance(event, Request)
                call.end(event)
        finally:
            events.close()
        return call.output()

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
    ) -> AsyncStream:
        """Starts one prompt and hands out its tokens and text as they come."""
        return AsyncStream(self.llm.client, self._call(prompt, params, request_id, streams=True))

    def abort(self, request_id: str) -> None:
        """As LLM.abort: from any task or thread; does not wait."""
        self.llm.abort(request_id)

    def _call(
        self, prompt: Prompt, params: SamplingParams | None, request_id: str | None, streams: bool
    ) -> Call:
        ids = None if request_id is None else [request_id]
        return self.llm.intake.calls([prompt], params, ids, streams=streams)[0]

    async def __aenter__(self) -> AsyncLLM:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


class AsyncStream:
    """Updates of one request as its tokens come, samples mixed as the engine serves them.

    >>> async with llm.stream("Hello") as stream:
    ...     async for update in stream:
    ...         print(update.text, end="")

    aclose(), the end of an `async with` (or of contextlib.aclosing), and an exception raised while
    waiting for an update, the task's cancellation for one, abort what remains. So does the death of
    a stream that nothing refers to. `break`, or an exception in the body of a loop, does not end a
    stream that a name or a traceback still holds: without `async with` its request runs on as long.

    Attributes:
        request_id: for AsyncLLM.abort.
    """

    def __init__(self, client: Client, call: Call) -> None:
        self.request_id = call.request_id
        self._events = _Events(client, call)
        self._updates = Updates([call])

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> StreamUpdate:
        try:
            if self._updates.refused:
                return self._updates.refused.pop(0)
            if self._updates.complete or self._events.closed:
                raise StopAsyncIteration
            return self._updates.of(await self._events.next())
        except BaseException:
            self._events.close()
            raise

    async def aclose(self) -> None:
        """Aborts what has not finished; repeatable."""
        self._events.close()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if hasattr(self, "_events"):
            self._events.close()


class _Events:
    """Submits a call and brings what comes of it into the running loop."""

    def __init__(self, client: Client, call: Call) -> None:
        self._client = client
        self._call = call
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Event] = asyncio.Queue()
        self.closed = False
        try:
            client.open([call], self._put)
            client.submit([call])
        except BaseException:
            self.close()
            raise

    async def next(self) -> Event:
        """Raises the event if it is an error."""
        event = await self._queue.get()
        if isinstance(event, BaseException):
            raise event
        return event

    def close(self) -> None:
        """Aborts what has not finished; repeatable."""
        self.closed = True
        self._client.drop([self._call])

    def _put(self, event: Event) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._queue.put_nowait, event)
