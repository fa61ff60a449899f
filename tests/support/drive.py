"""EngineCore on a fake model, driven call by call, with every invariant checked on the way."""

from __future__ import annotations

import os
from collections import Counter, deque
from types import SimpleNamespace
from typing import Any

from engine.core import EngineCore
from engine.execution.launched import Launched
from engine.ranks.messages import Results
from engine.requests.request import FinishReason, Request
from engine.scheduling.scheduler import Schedule
from tests.support.fake_model import FakeRunner, reference, spell

PHASES = ("before plan", "planned", "in flight", "collected")
"""Points of a turn at which an abort may come."""


def schedules(plain: int) -> int:
    """How many random schedules a property test runs: `plain`, or $RANGEFINDER_SCHEDULES."""
    return int(os.environ.get("RANGEFINDER_SCHEDULES", plain))


class Drive:
    """A core, the requests that were given to it, and all that came back. Its steps are taken apart
    by `turn`, or whole by `step`, but not both in one run."""

    def __init__(self, **config: Any) -> None:
        self.max_model_len = config["max_model_len"]
        self.runner: Any = FakeRunner(**config)
        self.core = self.runner.core = EngineCore(self.runner)
        self.core._tokenizer = SimpleNamespace(decode=spell)  # type: ignore[assignment]
        self.requests: dict[str, Request] = {}
        self.ended: Counter[str] = Counter()
        self.heard: dict[str, list[int]] = {}
        self.turns = 0
        self.preemptions = 0
        self.depth = 2 if config.get("overlap") else 1
        self.flying: deque[tuple[Schedule, Launched]] = deque()

    def add(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.core.add(request)

    def turn(self, aborts: dict[str, list[str]]) -> None:
        self.turns += 1
        self.abort(aborts, "before plan")
        schedule, plan = self.core.plan()
        self.preemptions += len(schedule.preempted)
        self._check()
        if plan is not None:
            self.abort(aborts, "planned")
            self.flying.append((schedule, self.core.launch(schedule, plan)))
            self.abort(aborts, "in flight")
        if self.flying and (plan is None or len(self.flying) == self.depth):
            self._book(self.core.collect(*self.flying.popleft()))
            self._check()
            self.abort(aborts, "collected")
        elif plan is None:
            self._book(self.core.step())

    def step(self) -> None:
        """As the engine's loop does it. What it raises goes through."""
        self.turns += 1
        try:
            self._book(self.core.step())
        finally:
            self._check()

    def reset_prefix_cache(self) -> None:
        """Between steps, as the engine's loop answers a question."""
        for results in self.core.settle():
            self._book(results)
        self.core.reset_prefix_cache()
        self._check()

    @property
    def has_work(self) -> bool:
        return self.core.has_work or bool(self.flying)

    def abort(self, aborts: dict[str, list[str]], phase: str) -> None:
        for request_id in aborts.get(phase, ()):
            self.core.abort(request_id)
            self._check()

    def _check(self) -> None:
        self.core._scheduler.check_invariants()

    def _book(self, results: Results) -> None:
        for request_id, token in results.tokens:
            assert self.requests[request_id].streams and not self.ended[request_id]
            self.heard.setdefault(request_id, []).append(token)
        self.ended.update(request.request_id for request in results.finished)

    def check_end(self, aborted: set[str]) -> None:
        """After the last turn; `aborted`: those that may have been."""
        assert not self.core.has_work
        assert self.ended == Counter(self.requests.keys()), "a request is lost or ended twice"
        assert self.core._pool.num_free == self.core._pool.num_pages
        assert not self.core._streams
        for request_id, request in self.requests.items():
            if request.finish_reason is FinishReason.ERROR:
                continue
            tokens, reason, stop_reason = reference(
                request.prompt_ids, request.params, self.max_model_len
            )
            if request.finish_reason is FinishReason.ABORT:
                assert request_id in aborted and request.finished_s is not None
                assert request.output_ids == tokens[: len(request.output_ids)]
            else:
                ended = (request.output_ids, request.finish_reason, request.stop_reason)
                assert ended == (tokens, reason, stop_reason)
            assert len(request.token_times_s) == len(request.output_ids)
            heard = self.heard.get(request_id, [])
            assert heard == request.output_ids[: len(heard)]
            if request.streams and request.finish_reason is not FinishReason.ABORT:
                assert len(heard) == len(tokens) - 1  # the last one comes with the request
            if request.params.stop:
                text, stop = spell(request.output_ids), request.params.stop[0]
                assert request.text == text.split(stop)[0] and request.watched is None
