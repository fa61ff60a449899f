"""LLM: the engine as its users see it."""

from __future__ import annotations

import itertools
import operator
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from engine.comm.types import ObserverFactory
from engine.config import EngineConfig
from engine.errors import RequestError
from engine.group import RankGroup
from engine.messages import (
    Attach,
    Captures,
    Control,
    Counters,
    Detach,
    DrainSteps,
    Memory,
    ResetPrefixCache,
)
from engine.request import FinishReason, Request, RequestOutput
from engine.resolve import resolve
from engine.sampling_params import SamplingParams
from engine.shape import ModelShape
from engine.solo_rank import SoloRank

Prompt = str | Sequence[int]
_SEED_STEP = 0x9E3779B97F4A7C15  # odd, so that consecutive ordinals give distant, distinct seeds


class LLM:
    """A Qwen3 engine over `tp` ranks.

    >>> with LLM("path/to/qwen3", tp=2, enforce_eager=True) as llm:
    ...     outputs = llm.generate(["Hello"], SamplingParams(temperature=0, max_tokens=16))

    At tp > 1 the ranks are spawned processes, so a script needs the usual
    `if __name__ == "__main__":`.

    Attributes:
        config: as asked for; effective: what runs, every `auto` replaced.
        shape: the model's numbers.
        startup: seconds by phase (spawn_s, load_s, compile_s, capture_s, warmup_s, total_s); None
            for a phase that did not happen.

    Raises:
        ConfigError, CheckpointError: before or while loading.
        EngineDeadError: from any call, once a rank has raised or died.
    """

    def __init__(self, model: str | Path | EngineConfig, **options: Any) -> None:
        if isinstance(model, EngineConfig):
            if options:
                raise TypeError("give an EngineConfig or keyword options, not both")
            self.config = model
        else:
            self.config = EngineConfig(model=str(model), **options)
        self.shape = ModelShape.from_hf(self.config.model)
        resolved = resolve(self.config, self.shape)
        ranks: type[SoloRank] | type[RankGroup] = SoloRank if resolved.tp == 1 else RankGroup
        self._ranks: SoloRank | RankGroup = ranks(resolved, self.shape)
        self.effective: dict[str, Any] = self._ranks.effective
        self.startup: dict[str, float | None] = self._ranks.startup
        self._ordinals = itertools.count()
        self._lock = threading.RLock()
        self._tokenizer: Any = None

    # -- generating -------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        arrivals_s: Sequence[float] | None = None,
    ) -> list[RequestOutput]:
        """Runs the prompts to their ends; outputs in the order of the prompts.

        Args:
            prompts: texts, or token ids.
            params: one for all, or one each.
            arrivals_s: when each request arrives, seconds from this call; None: all at once.

        Calls from several threads are served one after the other.

        A request that cannot be served comes back with finish_reason "error" and says why in
        `error`; the others are served.
        """
        if isinstance(prompts, str):
            raise RequestError("prompts is one text: give a list of prompts")
        if params is None:
            params = SamplingParams()
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        offsets = [0.0] * len(prompts) if arrivals_s is None else list(arrivals_s)
        for name, given in (("params", each), ("arrivals_s", offsets)):
            if len(given) != len(prompts):
                raise RequestError(f"{len(given)} {name} for {len(prompts)} prompts: give one each")
        encoded = [self._encode(prompt) for prompt in prompts]
        start = time.perf_counter()
        requests, refused = [], {}
        for ids, param, offset in zip(encoded, each, offsets, strict=True):
            request = self._request([] if isinstance(ids, str) else ids, param, start + offset)
            requests.append(request)
            if isinstance(ids, str):
                request.finish_reason, request.error = FinishReason.ERROR, ids
                refused[request.request_id] = request
        with self._lock:
            finished = self._run([r for r in requests if r.request_id not in refused]) | refused
        return [
            RequestOutput.from_request(
                finished[request.request_id],
                self._decode(finished[request.request_id]) if isinstance(prompt, str) else None,
            )
            for request, prompt in zip(requests, prompts, strict=True)
        ]

    def _run(self, requests: list[Request]) -> dict[str, Request]:
        coming = sorted(requests, key=lambda r: r.arrival_s)
        own = {request.request_id for request in requests}
        finished: dict[str, Request] = {}
        next_arrival = 0
        try:
            while len(finished) < len(requests):
                now = time.perf_counter()
                due = next_arrival
                while due < len(coming) and coming[due].arrival_s <= now:
                    due += 1
                if due > next_arrival:
                    self._ranks.submit(coming[next_arrival:due])
                    next_arrival = due
                wait_s = coming[due].arrival_s - now if due < len(coming) else None
                for request in self._ranks.poll(wait_s):
                    if request.request_id in own:  # else left over from an interrupted call
                        finished[request.request_id] = request
        except BaseException:
            self._drop(requests, finished)
            raise
        return finished

    def _drop(self, requests: list[Request], finished: dict[str, Request]) -> None:
        """After an interrupt: nothing of this call may run on into the next."""
        try:
            for request in requests:
                if request.request_id not in finished:
                    self._ranks.abort(request.request_id)
        except Exception:  # the engine is dead; the first error is the one to see
            return

    def _request(self, ids: list[int], params: SamplingParams, arrival_s: float) -> Request:
        ordinal = next(self._ordinals)
        derived = (self.config.seed + (ordinal + 1) * _SEED_STEP) % 2**63
        seed = derived if params.seed is None else params.seed
        return Request(str(ordinal), ids, params, seed, arrival_s)

    # -- text -------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Any:
        """The checkpoint's tokenizer, loaded at first use."""
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(self.config.model)
        return self._tokenizer

    def _encode(self, prompt: Prompt) -> list[int] | str:
        """-> token ids, or what is wrong with the prompt."""
        if isinstance(prompt, str):
            return list(self.tokenizer.encode(prompt))
        try:
            return [operator.index(token) for token in prompt]
        except TypeError as error:
            return f"a prompt is a text or a sequence of integer token ids: {error}"

    def _decode(self, request: Request) -> str | None:
        if request.finish_reason is FinishReason.ERROR:
            return None
        return str(self.tokenizer.decode(request.output_ids, skip_special_tokens=True))

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
        captures, triton_builds; and of rank 0 scheduled_steps, preemptions, cached_tokens."""
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
        with self._lock:
            return self._ranks.control(message)

    # -- life -------------------------------------------------------------------------------------

    def close(self) -> None:
        """Frees the model and ends the ranks; repeatable."""
        self._ranks.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
