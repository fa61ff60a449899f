"""Random loads on a fake model: whatever is scheduled, tokens and K/V are the right ones."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from engine.errors import RequestError
from engine.requests.request import FinishReason, Request
from engine.requests.sampling_params import SamplingParams
from engine.scheduling.blocks import BlockPool
from engine.scheduling.lookahead import ends_in_flight
from engine.scheduling.scheduler import Schedule, Scheduler
from engine.scheduling.step import StepPlan
from tests.support.drive import schedules
from tests.support.fake_model import EOS, FakeModel, reference

LOADS = schedules(200)  # some 15 ms each


@dataclass
class Load:
    prompts: list[list[int]]
    params: list[SamplingParams]
    leaders: list[int | None]  # whose prompt each shares, an earlier one's
    arrivals: list[int]  # the step before which each request is added
    aborts: dict[int, list[tuple[int, bool]]]  # step -> (request, while that step is in flight)
    page_size: int
    num_pages: int
    max_num_seqs: int
    budget: int
    max_model_len: int
    prefix_cache: bool
    depth: int = 1

    def pages_needed(self, index: int) -> int:
        most = len(self.prompts[index]) + self.params[index].max_tokens
        return -(-(min(most, self.max_model_len) - 1) // self.page_size)

    def feasible(self, index: int) -> bool:
        fits = self.pages_needed(index) <= self.num_pages
        return fits and 0 < len(self.prompts[index]) < self.max_model_len


@st.composite
def loads(draw: st.DrawFn) -> Load:
    count = draw(st.integers(1, 10))
    page_size = draw(st.integers(1, 6))
    # Few stems, whole or cut, followed by little: equal prefixes are common.
    stems = draw(st.lists(st.lists(st.integers(0, 2), max_size=20), min_size=1, max_size=2))
    prompts = [
        draw(st.sampled_from(stems))[: draw(st.integers(0, 20))]
        + draw(
            st.lists(st.integers(0, 2), min_size=draw(st.sampled_from([0, 1, 1, 1])), max_size=5)
        )
        for _ in range(count)
    ]
    leaders: list[int | None] = [None] * count
    arrivals = [draw(st.sampled_from([0, 0, 1, 2, 9])) for _ in range(count)]
    for i in range(1, count):  # n > 1: a follower of the request before, or of its leader
        if draw(st.sampled_from([False, False, True])):
            leaders[i] = i - 1 if leaders[i - 1] is None else leaders[i - 1]
            prompts[i], arrivals[i] = prompts[i - 1], arrivals[i - 1]
    params = [
        SamplingParams(
            max_tokens=draw(st.integers(1, 24)),
            ignore_eos=draw(st.sampled_from([True, True, False])),
        )
        for _ in range(count)
    ]
    max_num_seqs = draw(st.integers(1, 6))
    load = Load(
        prompts=prompts,
        params=params,
        leaders=leaders,
        arrivals=arrivals,
        aborts={},
        page_size=page_size,
        num_pages=1,
        max_num_seqs=max_num_seqs,
        budget=max_num_seqs + draw(st.integers(0, 12)),
        max_model_len=draw(st.sampled_from([8, 24, 64, 64])),
        prefix_cache=draw(st.booleans()),
        depth=draw(st.sampled_from([1, 2])),
    )
    # Mostly tight: just enough for the largest request, so that preemption is common.
    needed = [load.pages_needed(i) for i in range(count)]
    largest = draw(st.sampled_from([max(needed), max(needed), draw(st.sampled_from(needed))]))
    load.num_pages = max(1, largest + draw(st.integers(0, 4)))
    for _ in range(draw(st.integers(0, 3))):
        step = draw(st.integers(0, 12))
        victim = draw(st.integers(0, count - 1)), draw(st.booleans())
        load.aborts.setdefault(step, []).append(victim)
    return load


class Run:
    """A load driven to its end, with every invariant checked at every step."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.pool = BlockPool(load.num_pages, load.page_size, load.prefix_cache)
        self.scheduler = Scheduler(
            pool=self.pool,
            max_num_seqs=load.max_num_seqs,
            max_num_batched_tokens=load.budget,
            max_model_len=load.max_model_len,
            eos_token_ids=EOS,
            depth=load.depth,
        )
        self.flying: deque[tuple[Schedule, list[int]]] = deque()
        self.model = FakeModel(load.page_size, load.num_pages, load.max_num_seqs)
        self.requests = [
            Request(
                str(i),
                list(load.prompts[i]),
                load.params[i],
                seed=i,
                arrival_s=0.0,
                leader_id=None if load.leaders[i] is None else str(load.leaders[i]),
            )
            for i in range(len(load.prompts))
        ]
        self.finished: list[Request] = []
        self.preemptions = 0

    def add(self, index: int) -> None:
        if self.load.feasible(index):
            self.scheduler.add(self.requests[index])
        else:
            with pytest.raises(RequestError):
                self.scheduler.add(self.requests[index])

    def abort(self, step: int, in_flight: bool) -> None:
        for index, when in self.load.aborts.get(step, []):
            if when == in_flight:
                request = self.scheduler.abort(str(index))
                self.finished += [request] if request else []
                self.scheduler.check_invariants()

    def step(self, number: int) -> None:
        self.abort(number, in_flight=False)
        decoding = [
            r
            for r in self.requests
            if r.finish_reason is None
            and r.slot >= 0
            and r.num_tokens - r.num_computed == 1
            and r not in self.scheduler._aborted
            and not ends_in_flight(r, self.load.max_model_len)
        ]
        resident = {r: r.num_computed for r in self.requests if r.slot >= 0}
        schedule = self.scheduler.schedule()
        self.scheduler.check_invariants()
        if not schedule.seqs:
            self.book(number)
            return
        assert sum(seq.query_len for seq in schedule.seqs) <= self.load.budget
        served = {seq.request: seq for seq in schedule.seqs}
        for request in decoding:
            assert request in schedule.preempted or served[request].query_len == 1
        assert not set(served) & set(schedule.preempted)
        for seq in schedule.seqs:  # (re)admitted, or going on where it stopped
            hit = seq.request not in resident
            assert hit or seq.start == resident[seq.request]
            assert not hit or seq.start % self.load.page_size == 0
            assert self.load.prefix_cache or not hit or seq.start == 0
        self.preemptions += len(schedule.preempted)
        message = StepPlan.from_schedule(number, schedule.seqs).to_bytes()
        sampled = self.model.run(StepPlan.from_bytes(message), schedule, self.pool)
        self.flying.append((schedule, sampled))
        self.abort(number, in_flight=True)
        if len(self.flying) == self.load.depth:
            self.book(number)

    def book(self, number: int) -> None:
        """The oldest step in flight, if there is one."""
        if self.flying:
            schedule, sampled = self.flying.popleft()
            self.finished += self.scheduler.update(schedule, sampled, now_s=float(number))
            self.scheduler.check_invariants()

    def drive(self) -> None:
        last = max(self.load.arrivals)
        for number in range(2_000):
            for index, arrival in enumerate(self.load.arrivals):
                if arrival == number:
                    self.add(index)
            if number > last and not (self.scheduler.has_work or self.flying):
                return
            self.step(number)
        raise AssertionError("no end in 2,000 steps")


@pytest.mark.timeout(300 + LOADS // 10)
@settings(max_examples=LOADS, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(loads())
def test_every_request_ends_with_the_tokens_of_a_run_alone(load: Load) -> None:
    run = Run(load)
    run.drive()
    event(f"preemptions: {min(run.preemptions, 3)}")
    event(f"cached: {any(r.cached_tokens for r in run.requests)}")
    added = [r for i, r in enumerate(run.requests) if load.feasible(i)]
    assert Counter(run.finished) == Counter(added), "a request is lost or returned twice"
    assert run.pool.num_free == load.num_pages
    aborted = {index for victims in load.aborts.values() for index, _ in victims}
    for index, request in enumerate(run.requests):
        if request not in added:
            continue
        tokens, reason, _ = reference(load.prompts[index], load.params[index], load.max_model_len)
        if request.finish_reason is FinishReason.ABORT:
            assert index in aborted
            assert request.output_ids == tokens[: len(request.output_ids)]
        else:
            assert (request.output_ids, request.finish_reason) == (tokens, reason)
        assert request.prompt_ids == load.prompts[index]
        assert len(request.token_times_s) == len(request.output_ids)
        assert request.cached_tokens < len(request.prompt_ids)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 24), st.integers(1, 24), st.integers(1, 8), st.booleans())
def test_a_prompt_may_be_cut_anywhere(
    prompt_len: int, budget: int, page_size: int, warm: bool
) -> None:
    prompt = [i % 3 for i in range(prompt_len)]
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    copies = 2 if warm else 1
    load = Load(
        prompts=[prompt] * copies,
        params=[params] * copies,
        leaders=[None] * copies,
        arrivals=[0, 60][:copies],  # the second one after the end of the first
        aborts={},
        page_size=page_size,
        num_pages=64,
        max_num_seqs=1,
        budget=budget,
        max_model_len=64,
        prefix_cache=True,
    )
    run = Run(load)
    run.drive()
    tokens, *_ = reference(prompt, params, 64)
    assert [r.output_ids for r in run.requests] == [tokens] * copies
    if warm:
        assert run.requests[1].cached_tokens == (prompt_len - 1) // page_size * page_size
