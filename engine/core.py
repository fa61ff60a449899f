"""The engine's step as three calls: plan (schedule), launch (enqueue), collect (ids)."""

from __future__ import annotations

import time
from collections.abc import Callable

from engine.blocks import BlockPool
from engine.errors import RequestError
from engine.launched import Launched
from engine.request import FinishReason, Request
from engine.runner import Runner
from engine.sampling_plan import SamplingPlan
from engine.scheduler import Schedule, Scheduler
from engine.step import StepPlan


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
        self._scheduler = Scheduler(
            pool=self._pool,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            eos_token_ids=runner.shape.eos_token_ids,
        )
        self._vocab_size = runner.shape.vocab_size
        self._eos = runner.shape.eos_token_ids
        self._next_step = 0
        self._ended: list[Request] = []  # outside a step: refused or aborted
        self._preemptions = 0
        self._cached_tokens = 0

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or bool(self._ended)

    def add(self, request: Request) -> None:
        """Queues a request. One that cannot be served comes back from the next step as finished
        with an error; nothing else is touched."""
        try:
            self._check_ids(request)
            request.params.check_model(self._vocab_size, self._eos)
            self._scheduler.add(request)
        except RequestError as error:
            request.finish_reason, request.error = FinishReason.ERROR, str(error)
            request.finished_s = time.perf_counter()
            self._ended.append(request)

    def abort(self, request_id: str) -> None:
        """Ends a request, which comes back as aborted; unknown or finished ids are ignored."""
        request = self._scheduler.abort(request_id)
        if request is not None:
            self._ended.append(request)

    def step(self) -> list[Request]:
        """Runs one step if there is work for one; returns the requests that ended."""
        begin = time.perf_counter_ns()
        schedule, plan = self.plan()
        finished, self._ended = self._ended, []
        if plan is None:
            return finished
        try:
            finished += self.collect(schedule, self.launch(schedule, plan))
        except BaseException:
            self._abandon(schedule)
            raise
        self._runner.record_wall(begin, time.perf_counter_ns())
        return finished

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

    def collect(self, schedule: Schedule, launched: Launched) -> list[Request]:
        """Reads the ids back, appends them, and returns the requests that ended."""
        sampled = self._runner.collect(launched)
        finished = self._scheduler.update(schedule, sampled, time.perf_counter())
        launched.keep_logprobs()
        return finished

    def _abandon(self, schedule: Schedule) -> None:
        """An interrupted step (Ctrl-C, an observer that raises): its requests end as aborted, and
        since nobody knows which K/V was written, no cached prefix is trusted any more."""
        for seq in schedule.seqs:
            self.abort(seq.request.request_id)
        if self._scheduler.in_flight:
            sampled = [0] * sum(seq.samples for seq in schedule.seqs)
            self._ended += self._scheduler.update(schedule, sampled, time.perf_counter())
        self._pool.reset_prefix_cache()

    def reset_prefix_cache(self) -> None:
        """Forgets every cached prefix, those that running requests hold included."""
        self._pool.reset_prefix_cache()

    def counters(self) -> dict[str, int]:
        return {
            "scheduled_steps": self._next_step,
            "preemptions": self._preemptions,
            "cached_tokens": self._cached_tokens,
        }

    def _check_ids(self, request: Request) -> None:
        bad = next((t for t in request.prompt_ids if not 0 <= t < self._vocab_size), None)
        if bad is not None:
            raise RequestError(
                f"prompt token id {bad}: this model's ids are in [0, {self._vocab_size})"
            )
