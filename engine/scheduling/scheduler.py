"""Scheduler: which tokens of which requests the next step computes (continuous batching)."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from engine.errors import RequestError
from engine.requests.finish import finish_reason
from engine.requests.request import FinishReason, Request
from engine.scheduling.admission import check_size
from engine.scheduling.blocks import BlockPool
from engine.scheduling.invariants import check_scheduler
from engine.scheduling.lookahead import ends_in_flight, pages_short, remaining
from engine.scheduling.prefix import publish_pages
from engine.scheduling.step import ScheduledSeq


@dataclass(slots=True)
class Schedule:
    """One step: its sequences in the order of the forward, and the requests preempted for it."""

    seqs: list[ScheduledSeq]
    preempted: list[Request]


class Scheduler:
    """Serves requests first come, first served, under a token budget per step.

    Each step serves, in this order: every running request that has one token left to compute (one
    token each; the budget covers max_num_seqs, so decoding never waits for prompts), then running
    prompts, in chunks cut wherever the budget ends, then new requests from the head of the queue.

    A request is admitted only when pages for all its known tokens are free, and takes them then,
    so only decoding makes it grow. When the pool is empty, the most recently admitted request is
    preempted: it gives up its pages and slot, returns to the head of the queue and is recomputed
    from prompt + output, less what the prefix cache still holds. The oldest request is never
    preempted for another and fits the pool alone (`add` checks that), so every step makes progress.
    A step that preempts admits nobody, and a head that did not fit is tried again only after pages
    were released: looking its prefix up in each step would cost work linear in its length, where a
    step's work is linear in its batch and its tokens only.

    With `depth` 2 a step may be planned while the one before it, whose ids are not known, is in
    flight. A request whose length will not end it is taken to go on; one that does end has a token
    too many in the later step, and gives up slot and pages when that is booked. Nothing is
    preempted while a step is in flight.

    With a prefix cache, a request with a leader (`Request.leader_id`) is held until the leader's
    prompt is computed or the leader has ended, and then goes to the head: it arrived with it.

    Args:
        max_num_seqs: requests that hold a slot and pages at once.
        max_num_batched_tokens: query tokens of one step; at least max_num_seqs.
        max_model_len: prompt + output tokens of a request at most.
        eos_token_ids: tokens that end a request unless it ignores them.
        depth: steps in flight at most.
    """

    def __init__(
        self,
        *,
        pool: BlockPool,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        eos_token_ids: Collection[int],
        depth: int = 1,
    ) -> None:
        assert 1 <= max_num_seqs <= max_num_batched_tokens, (max_num_seqs, max_num_batched_tokens)
        self._pool = pool
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_model_len = max_model_len
        self._eos = frozenset(eos_token_ids)
        self._requests: dict[str, Request] = {}  # every request that has not finished
        self._waiting: deque[Request] = deque()
        self._held: dict[str, list[Request]] = {}  # by leader, until its prompt is computed
        self._running: list[Request] = []  # in order of admission
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._depth = depth
        self._in_flight: deque[Schedule] = deque()
        self._aborted: set[Request] = set()  # to be finished when their step is booked
        self._surplus: set[Request] = set()  # finished, but resident until their step is booked
        self._releases = 0  # how often a request has given up its pages
        self._unfit: tuple[Request, int] | None = None  # head that did not fit, releases by then

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + sum(map(len, self._held.values()))

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
            RequestError: it can never be served, or its id is in use.
        """
        if request.request_id in self._requests:
            raise RequestError(
                f"request_id={request.request_id!r} is in use: give each request an id of its own"
            )
        check_size(request, self._max_model_len, self._pool)
        self._requests[request.request_id] = request
        leader = self._requests.get(request.leader_id or "")
        shared = self._pool.prefix_cache and len(request.prompt_ids) > self._pool.page_size
        if leader is not None and not leader.output_ids and shared:
            self._held.setdefault(leader.request_id, []).append(request)
        else:
            self._waiting.append(request)

    def abort(self, request_id: str) -> Request | None:
        """Ends a request in whatever state it is. Returns it if it is finished now; None if its
        step is in flight, so that `update` will return it, or if no unfinished request has the id.
        """
        request = self._requests.get(request_id)
        if request is None:
            return None
        if request.steps_in_flight:
            self._aborted.add(request)
            return None
        held = self._held.get(request.leader_id or "", [])
        if request in held:
            held.remove(request)
        else:
            (self._running if request.slot >= 0 else self._waiting).remove(request)
        self._finish(request, FinishReason.ABORT)
        self._let_go([request])
        return request

    def abandon(self) -> list[Request]:
        """After a step that raised, wherever it was: forgets what is in flight and ends every
        request; returns those that had not ended."""
        ended = list(self._requests.values())
        for request in [*ended, *self._surplus]:
            request.steps_in_flight = request.tokens_in_flight = 0
        for request in self._surplus:
            self._vacate(request)
        for kept in (self._surplus, self._in_flight, self._waiting, self._running, self._held):
            kept.clear()
        for request in ended:
            self._finish(request, FinishReason.ABORT)
        return ended

    def schedule(self) -> Schedule:
        """Plans the next step. Empty when no request is left or when the step in flight must be
        booked first; then there is no `update`."""
        assert len(self._in_flight) < self._depth, "update() the step in flight first"
        schedule = Schedule([], [])
        ending = self._aborted | {
            r for r in self._running if ends_in_flight(r, self._max_model_len)
        }
        going = [r for r in self._running if r not in ending]
        decoding = [r for r in going if remaining(r) == 1]
        if self._in_flight and pages_short(self._pool, decoding):
            return schedule
        for request in decoding:
            # One that was preempted in this loop has no slot any more.
            if request.slot >= 0 and self._grow(request, schedule):
                self._place(request, 1, schedule)
        budget = self._max_num_batched_tokens - len(schedule.seqs)
        for request in going:
            if budget and request.slot >= 0 and remaining(request) > 1:
                budget -= self._place(request, budget, schedule)
        if not schedule.preempted:
            while budget and self._admit_head():
                budget -= self._place(self._running[-1], budget, schedule)
        assert schedule.seqs or self._in_flight or not self.has_work, "a step without progress"
        if schedule.seqs:
            self._in_flight.append(schedule)
        return schedule

    def update(self, schedule: Schedule, sampled: Sequence[int], now_s: float) -> list[Request]:
        """Books a computed step. `sampled`: ids of the sequences that sample, in their order;
        `now_s`: when they were handed out, `time.perf_counter()` seconds.

        Returns the requests that finished, finish_reason and finished_s set.
        """
        assert schedule is self._in_flight[0], "not the oldest step in flight"
        assert len(sampled) == sum(seq.samples for seq in schedule.seqs)
        self._in_flight.popleft()
        finished: list[Request] = []
        tokens = iter(sampled)
        for seq in schedule.seqs:
            request = seq.request
            token = next(tokens) if seq.samples else None
            request.steps_in_flight -= 1
            request.tokens_in_flight -= seq.samples
            if request in self._surplus:
                self._vacate(request)
                self._surplus.remove(request)
                continue
            publish_pages(self._pool, request, seq.start, seq.start + seq.query_len)
            reason = FinishReason.ABORT if request in self._aborted else None
            if token is not None and reason is None:
                reason = self._append(request, token, now_s)
            if reason is not None:
                self._finish(request, reason)
                request.finished_s = now_s
                finished.append(request)
        if self._held:
            self._let_go([s.request for s in schedule.seqs if s.samples or s.request.finish_reason])
        if finished:
            self._running = [r for r in self._running if r.finish_reason is None]
        return finished

    def check_invariants(self) -> None:
        """Raises AssertionError on an inconsistent state; linear in everything, for tests."""
        check_scheduler(self)

    def _place(self, request: Request, budget: int, schedule: Schedule) -> int:
        """Puts as much of a request into the step as the budget allows; returns the tokens used."""
        start, left = request.num_computed, remaining(request)
        query_len = min(left, budget)
        samples = query_len == left
        seq = ScheduledSeq(request, start, query_len, samples, request.token_on_device)
        schedule.seqs.append(seq)
        request.num_computed += query_len
        request.steps_in_flight += 1
        if samples:
            request.tokens_in_flight += 1
            request.token_on_device = True
        return query_len

    def _grow(self, request: Request, schedule: Schedule) -> bool:
        """Makes sure that the next position has a page; False if the request itself had to go.

        The victim is the last of `_running`, hence this request or one that comes after it in the
        order in which decodes are placed: it is never in the schedule already.
        """
        if request.num_computed < len(request.page_ids) * self._pool.page_size:
            return True
        while (page := self._pool.allocate(1)) is None:
            victim = self._running.pop()
            self._vacate(victim)
            victim.num_computed = 0
            victim.token_on_device = False
            victim.preemptions += 1
            self._waiting.appendleft(victim)
            schedule.preempted.append(victim)
            if victim is request:
                return False
        request.page_ids += page
        return True

    def _admit_head(self) -> bool:
        """Moves the head of the queue to the running requests if a slot and its pages are there."""
        if not self._waiting or not self._free_slots:
            return False
        request = self._waiting[0]
        if self._unfit == (request, self._releases):
            return False
        limit = request.num_cacheable // self._pool.page_size
        hits = self._pool.match(request.prompt_ids + request.output_ids, limit)
        fresh = self._pool.pages_for(request.num_tokens) - len(hits)
        page_ids = self._pool.allocate(fresh, hits)
        if page_ids is None:
            self._unfit = (request, self._releases)
            return False
        self._running.append(self._waiting.popleft())
        request.slot = self._free_slots.pop()
        request.page_ids = page_ids
        request.pages_sent = 0
        request.num_computed = len(hits) * self._pool.page_size
        if request.preemptions == 0:
            request.cached_tokens = request.num_computed
        return True

    def _append(self, request: Request, token: int, now_s: float) -> FinishReason | None:
        request.output_ids.append(token)
        request.token_times_s.append(now_s)
        return finish_reason(request, self._eos, self._max_model_len)

    def _let_go(self, leaders: Sequence[Request]) -> None:
        """Puts those who wait for these leaders at the head of the queue, in the same order."""
        freed = [r for leader in leaders for r in self._held.pop(leader.request_id, ())]
        self._waiting.extendleft(reversed(freed))

    def _vacate(self, request: Request) -> None:
        """Takes pages and slot from a resident request."""
        self._pool.release(request.page_ids)
        self._free_slots.append(request.slot)
        self._releases += 1
        request.page_ids = []
        request.slot = -1

    def _finish(self, request: Request, reason: FinishReason) -> None:
        if request.steps_in_flight:
            self._surplus.add(request)
        elif request.slot >= 0:
            self._vacate(request)
        del self._requests[request.request_id]
        self._aborted.discard(request)
        request.finish_reason = reason
        if request.watched is not None:
            request.watched.finish()
            request.text, request.watched = request.watched.text, None
