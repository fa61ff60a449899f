"""The engine's step as three calls: plan (schedule), launch (enqueue), collect (ids)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from engine.errors import RequestError
from engine.execution.launched import Launched
from engine.execution.runner import Runner
from engine.inputs.readback import DEPTH
from engine.ranks.messages import Results
from engine.requests.request import FinishReason, Request
from engine.requests.text import StopText
from engine.requests.tokenizer import Tokenizer
from engine.sampling.plan import SamplingPlan
from engine.scheduling.admission import check_tokens
from engine.scheduling.blocks import BlockPool
from engine.scheduling.scheduler import Schedule, Scheduler
from engine.scheduling.step import StepPlan


@dataclass(frozen=True, slots=True)
class _Flying:
    """A step that was launched and is not collected; `begin_ns`: when it was planned."""

    number: int
    schedule: Schedule
    launched: Launched
    begin_ns: int


class EngineCore:
    """Rank 0's authority over requests: admits, plans, runs, collects.

    Args:
        runner: this rank's runner.
        tell_ranks: sends a plan to the other ranks, before this rank launches it.
    """

    def __init__(
        self, runner: Runner, tell_ranks: Callable[[StepPlan], None] = lambda plan: None
    ) -> None:
        config = runner.config
        assert config.num_pages is not None
        self._runner = runner
        self._tell_ranks = tell_ranks
        self._pool = BlockPool(config.num_pages, config.page_size, config.prefix_cache)
        self._depth = DEPTH if config.overlap else 1
        self._scheduler = Scheduler(
            pool=self._pool,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            eos_token_ids=runner.shape.eos_token_ids,
            depth=self._depth,
        )
        self._vocab_size = runner.shape.vocab_size
        self._eos = runner.shape.eos_token_ids
        self._tokenizer = Tokenizer(config.model)  # loaded by the first request with stop strings
        self._streams: set[Request] = set()
        self._flying: deque[_Flying] = deque()
        self._collected_ns = 0
        self._next_step = 0
        self._ended: list[Request] = []  # outside a step: refused or aborted
        self._preemptions = 0
        self._cached_tokens = 0

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or bool(self._ended) or bool(self._flying)

    def add(self, request: Request) -> None:
        """Queues a request. One that cannot be served comes back from the next step as finished
        with an error; nothing else is touched."""
        try:
            check_tokens(request, self._vocab_size)
            request.params.check_model(self._vocab_size, self._eos)
            if request.params.stop:
                self._tokenizer.decode([])  # raises if there is none
                request.watched = StopText(self._tokenizer.decode, request.params.stop)
            self._scheduler.add(request)
            if request.streams:
                self._streams.add(request)
        except RequestError as error:
            request.finish_reason, request.error = FinishReason.ERROR, str(error)
            request.finished_s = time.perf_counter()
            self._ended.append(request)

    def abort(self, request_id: str) -> None:
        """Ends a request, which comes back as aborted; unknown or finished ids are ignored."""
        request = self._scheduler.abort(request_id)
        if request is not None:
            self._end([request])

    def step(self) -> Results:
        """Launches the next step, if there is one that can be planned, and collects the oldest one
        in flight: with overlap, that is the one before it, which the device works on meanwhile.
        Returns what came of the step that was collected."""
        begin = time.perf_counter_ns()
        try:
            schedule, plan = self.plan()
            if plan is not None:
                launched = self.launch(schedule, plan)
                self._flying.append(_Flying(plan.step, schedule, launched, begin))
            if self._flying and (plan is None or len(self._flying) == self._depth):
                return self._land()
        except BaseException:
            self._abandon()
            raise
        return self._results([])

    def settle(self) -> list[Results]:
        """Collects all steps in flight."""
        try:
            return [self._land() for _ in range(len(self._flying))]
        except BaseException:
            self._abandon()
            raise

    def _land(self) -> Results:
        step = self._flying[0]
        results = self.collect(step.schedule, step.launched)
        self._flying.popleft()
        # What a step waited for the one before it is that one's time.
        begin, self._collected_ns = max(step.begin_ns, self._collected_ns), time.perf_counter_ns()
        self._runner.record_wall(step.number, begin, self._collected_ns)
        return results

    def plan(self) -> tuple[Schedule, StepPlan | None]:
        """Schedules the next step; the plan is None if there is nothing to run."""
        schedule = self._scheduler.schedule()
        self._preemptions += len(schedule.preempted)
        if not schedule.seqs:
            return schedule, None
        now = time.perf_counter()
        for seq in schedule.seqs:
            request = seq.request
            if request.first_scheduled_s is None:
                request.first_scheduled_s = now
                self._cached_tokens += request.cached_tokens
        plan = StepPlan.from_schedule(self._next_step, schedule.seqs)
        self._next_step += 1
        return schedule, plan

    def launch(self, schedule: Schedule, plan: StepPlan) -> Launched:
        """Sends the plan to every rank and enqueues it here, where sampling knows more."""
        self._tell_ranks(plan)
        sampling = None
        if not plan.says_all:
            sampling = SamplingPlan.from_schedule(schedule.seqs, self._vocab_size, self._eos)
        return self._runner.launch(plan, sampling)

    def collect(self, schedule: Schedule, launched: Launched) -> Results:
        """Reads the ids back, appends them, and returns the requests that ended, here or outside of
        a step, and the tokens of those that stream."""
        sampled = self._runner.collect(launched)
        self._ended += self._scheduler.update(schedule, sampled, time.perf_counter())
        launched.keep_logprobs()
        heard = [s.request for s in schedule.seqs if s.samples] if self._streams else []
        return self._results(heard)

    def _results(self, sampled: list[Request]) -> Results:
        finished, self._ended = tuple(self._ended), []
        if not self._streams:
            return Results(finished)
        self._streams.difference_update(finished)
        heard = [request for request in sampled if request in self._streams]
        return Results(finished, tuple((r.request_id, r.output_ids[-1]) for r in heard))

    def _abandon(self) -> None:
        """A step that raised (an observer, the device, a tokenizer): every request ends as aborted,
        and since nobody knows which K/V was written, no cached prefix is trusted any more."""
        self._flying.clear()
        self._end(self._scheduler.abandon())
        self._pool.reset_prefix_cache()

    def _end(self, aborted: list[Request]) -> None:
        now = time.perf_counter()
        for request in aborted:
            request.finished_s = now
        self._ended += aborted

    def reset_prefix_cache(self) -> None:
        """Forgets every cached prefix, those that running requests hold included."""
        self._pool.reset_prefix_cache()

    def counters(self) -> dict[str, int]:
        return {
            "scheduled_steps": self._next_step,
            "preemptions": self._preemptions,
            "cached_tokens": self._cached_tokens,
        }
