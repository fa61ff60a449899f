"""LLM: the engine as its users see it."""

from __future__ import annotations

import operator
import queue
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from engine.comm.types import ObserverFactory
from engine.config import EngineConfig
from engine.errors import RequestError
from engine.frontend.call import Call
from engine.frontend.client import Client, Event
from engine.frontend.intake import Intake, Prompt
from engine.frontend.stream import Stream
from engine.ranks.group import RankGroup
from engine.ranks.messages import (
    Attach,
    Captures,
    Control,
    Counters,
    Detach,
    DrainSteps,
    Memory,
    ResetPrefixCache,
)
from engine.ranks.solo_rank import SoloRank
from engine.requests.request import Request, RequestOutput
from engine.requests.sampling_params import SamplingParams
from engine.requests.tokenizer import Tokenizer
from engine.resolve import resolve
from engine.shape import ModelShape


class LLM:
    """A Qwen3 engine over `tp` ranks.

    >>> with LLM("path/to/qwen3", tp=2, enforce_eager=True) as llm:
    ...     outputs = llm.generate(["Hello"], SamplingParams(temperature=0, max_tokens=16))

    At tp > 1 the ranks are spawned processes, so a script needs the usual
    `if __name__ == "__main__":`.

    Any thread may call anything at any time. What several callers ask is served together, first
    come, first served; there are no priorities. Ctrl-C ends the call that it strikes.

    Attributes:
        config: as asked for; effective: what runs, every `auto` replaced.
        shape: the model's numbers.
        startup: seconds by phase (spawn_s, load_s, compile_s, capture_s, warmup_s, total_s); None
            for a phase that did not happen.
        intake, client: for the other forms of this API (frontend/stream.py, async_llm.py).

    Raises:
        ConfigError, CheckpointError: before or while loading.
        EngineDeadError: from any call, once a rank has raised or died.
    """

    def __init__(self, model: str | Path | EngineConfig, **options: Any) -> None:
        self.config = self.configuration(model, **options)
        self.shape = ModelShape.from_hf(self.config.model)
        resolved = resolve(self.config, self.shape)
        ranks: type[SoloRank] | type[RankGroup] = SoloRank if resolved.tp == 1 else RankGroup
        self.client = Client(partial(ranks, resolved, self.shape))
        self.effective: dict[str, Any] = self.client.ranks.effective
        self.startup: dict[str, float | None] = self.client.ranks.startup
        self._tokenizer = Tokenizer(self.config.model)
        self.intake = Intake(self._tokenizer, self.config.seed)

    @staticmethod
    def configuration(model: str | Path | EngineConfig, **options: Any) -> EngineConfig:
        """The arguments of an engine as one object."""
        if isinstance(model, EngineConfig):
            if options:
                raise TypeError("give an EngineConfig or keyword options, not both")
            return model
        return EngineConfig(model=str(model), **options)

    # -- generating -------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        arrivals_s: Sequence[float] | None = None,
        *,
        request_ids: Sequence[str] | None = None,
    ) -> list[RequestOutput]:
        """Runs the prompts to their ends; outputs in the order of the prompts.

        Args:
            prompts: texts, or token ids.
            params: one for all, or one each.
            arrivals_s: when each request arrives, finite seconds >= 0 from this call; None: all at
                once.
            request_ids: names for `abort`, one each, not of the form "#3": that is what requests
                without a name are called, by their ordinals.

        A request that cannot be served comes back with finish_reason "error" and says why in
        `error`; the others are served.

        Raises:
            RequestError: `prompts` is one prompt or no list, or another argument is not of the form
                above; nothing was started.
        """
        if _is_one(prompts):
            what = "text" if isinstance(prompts, str) else "prompt of token ids"
            raise RequestError(f"prompts is one {what}: give a list of prompts")
        calls = self.intake.calls(prompts, params, request_ids, arrivals_s)
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        try:
            self.client.open(calls, events.put)
            self._run(calls, events)
        except BaseException:  # an interrupt: nothing of this call may run on into the next
            self.client.drop(calls)
            raise
        return [call.output() for call in calls]

    def _run(self, calls: list[Call], events: queue.SimpleQueue[Event]) -> None:
        of = {request.request_id: call for call in calls for request in call.requests}
        unfinished = sum(len(call.requests) for call in calls if not call.finished)
        coming = deque(sorted(calls, key=lambda call: call.requests[0].arrival_s))
        while unfinished:
            now = time.perf_counter()
            due = []
            while coming and coming[0].requests[0].arrival_s <= now:
                due.append(coming.popleft())
            if due:
                self.client.submit(due)
            wait_s = max(0.0, coming[0].requests[0].arrival_s - now) if coming else None
            try:
                event = events.get(timeout=wait_s)
            except queue.Empty:
                continue
            if isinstance(event, BaseException):
                raise event
            assert isinstance(event, Request)
            of[event.request_id].end(event)
            unfinished -= 1

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        request_ids: Sequence[str] | None = None,
    ) -> Stream:
        """Starts the requests and hands out their tokens and text as they come.

        >>> with llm.stream("Hello") as stream:
        ...     for update in stream:
        ...         print(update.text, end="", flush=True)

        Args:
            prompts: one prompt or several, each a text or token ids; params, request_ids: as of
                `generate`.
        """
        listed = [prompts] if _is_one(prompts) else prompts
        calls = self.intake.calls(listed, params, request_ids, streams=True)  # type: ignore[arg-type]
        return Stream(self.client, calls)

    def abort(self, request_id: str) -> None:
        """Ends a request, all its samples, at any moment and from any thread. It comes back with
        finish_reason "abort" and what it had. Unknown and finished ids are ignored."""
        self.client.abort(request_id)

    @property
    def tokenizer(self) -> Any:
        """The checkpoint's tokenizer, loaded at first use.

        Raises:
            RequestError: the model's directory has none that loads.
        """
        return self._tokenizer.hf

    # -- measuring --------------------------------------------------------------------------------

    def attach(self, factories: Sequence[ObserverFactory]) -> None:
        """Creates an observer of each factory on every rank; they hear the steps from now on."""
        self._control(Attach(tuple(factories)))

    def detach(self) -> list[list[Any]]:
        """Removes the observers; -> result of each, by [rank][observer]."""
        return self._control(Detach())

    def drain_steps(self) -> list[np.ndarray]:
        """The steps since the last call, one array of steplog.STEP_DTYPE a rank."""
        return self._control(DrainSteps())

    def counters(self) -> dict[str, int]:
        """Ever-growing counts, summed over ranks: compiles, graph_breaks, cache_hits, cache_misses,
        captures, triton_builds; and of rank 0 scheduled_steps, preemptions, cached_tokens. What is
        compiled and built is counted by process: engines at tp=1 in one process count it all."""
        total: dict[str, int] = {}
        for counts in self._control(Counters()):
            for name, count in counts.items():
                total[name] = total.get(name, 0) + count
        return total

    def memory(self) -> list[dict[str, int | None]]:
        """Bytes by rank: weights_bytes, kv_bytes, graph_pool_bytes, peak_bytes."""
        return self._control(Memory())

    def captures(self) -> list[tuple[int, float, int]]:
        """(bucket, seconds, bytes) of each CUDA graph that rank 0 captured at start-up, in order;
        bytes is what the device lost to it."""
        captured: list[tuple[int, float, int]] = self._control(Captures())[0]
        return captured

    def reset_prefix_cache(self) -> None:
        """Forgets every cached prefix."""
        self._control(ResetPrefixCache())

    def _control(self, message: Control) -> list[Any]:
        return self.client.control(message)

    # -- life -------------------------------------------------------------------------------------

    def close(self) -> None:
        """Frees the model and ends the ranks; repeatable. Who still waits for a request hears a
        RuntimeError."""
        self.client.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _is_one(prompts: Prompt | Sequence[Prompt]) -> bool:
    """Whether it is a prompt, not a list of them."""
    if isinstance(prompts, str):
        return True
    try:
        first: Any = prompts[0] if len(prompts) else ()
    except (TypeError, LookupError):
        raise RequestError(
            f"prompts is of type {type(prompts).__name__}: give a list of prompts, each a text or "
            "a sequence of integer token ids"
        ) from None
    try:
        operator.index(first)
    except TypeError:
        return False
    return np.ndim(first) == 0  # a tensor of one token is a prompt, not a token
