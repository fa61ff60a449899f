"""Random loads on a fake model: whatever is scheduled, the tokens and the K/V are the right ones.

The fake model's K/V of a position is a digest of the whole prefix up to it, computed from the
digest that it READS at the position before through the request's own pages, as attention would. A
wrong page, a wrong order, an overwritten or a missing position changes every token after it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from engine.blocks import BlockPool
from engine.errors import RequestError
from engine.request import FinishReason, Request
from engine.sampling_params import SamplingParams
from engine.scheduler import Schedule, Scheduler
from engine.step import StepPlan

VOCAB = 7
EOS = {0}
PRIME = 2**61 - 1


def extend(digest: int, token: int) -> int:
    return (digest * 1_000_003 + token + 1) % PRIME


def sample(digest: int) -> int:
    """The fake model's next token: a function of the whole prefix. Token 0 is EOS."""
    return digest % VOCAB


def digests(token_ids: list[int]) -> list[int]:
    out, digest = [], 0
    for token in token_ids:
        digest = extend(digest, token)
        out.append(digest)
    return out


def reference(
    prompt: list[int], params: SamplingParams, max_model_len: int
) -> tuple[list[int], FinishReason]:
    """What a request alone in an unlimited engine generates."""
    digest, output = digests(prompt)[-1], []
    while True:
        output.append(sample(digest))
        if output[-1] in EOS and not params.ignore_eos:
            return output, FinishReason.STOP
        if len(output) == params.max_tokens or len(prompt) + len(output) == max_model_len:
            return output, FinishReason.LENGTH
        digest = extend(digest, output[-1])


class FakeModel:
    """Executes schedules as a rank does: it knows a step from its message alone, keeps block tables
    and last tokens by slot, and has a K/V store of one digest for each (page, offset)."""

    def __init__(self, page_size: int, num_pages: int, max_num_seqs: int) -> None:
        self.page_size = page_size
        self.store: dict[tuple[int, int], int] = {}
        self.block_tables = [[-1] * num_pages for _ in range(max_num_seqs)]
        self.last_tokens = [-1] * max_num_seqs
        self.written: dict[Request, set[int]] = {}  # since the last admission

    def run(self, step: int, schedule: Schedule, pool: BlockPool) -> list[int]:
        for request in schedule.preempted:
            self.written.pop(request, None)
        message = StepPlan.from_schedule(step, schedule.seqs).to_bytes()
        plan = StepPlan.from_bytes(message)
        ids, pages = iter(plan.token_ids.tolist()), iter(plan.pages.tolist())
        sampled = []
        for row, seq in enumerate(schedule.seqs):
            slot, start = int(plan.slots[row]), int(plan.starts[row])
            table = self.block_tables[slot]
            for index in range(plan.page_counts[row]):
                table[plan.page_starts[row] + index] = next(pages)
            stop = start + int(plan.query_lens[row])
            cells = [(table[p // self.page_size], p % self.page_size) for p in range(stop)]
            written = self.written.setdefault(seq.request, set())
            for position in range(start, stop):
                token = next(ids)
                token = self.last_tokens[slot] if token < 0 else token
                before = self.store[cells[position - 1]] if position else 0
                assert pool.references(cells[position][0]) == 1, "a shared page is written"
                assert position not in written, "a position is written twice"
                written.add(position)
                self.store[cells[position]] = extend(before, token)
            # What attention reads is this request's own prefix, reused pages included.
            read = [self.store[cell] for cell in cells]
            assert read == digests([seq.request.token(p) for p in range(stop)])
            if plan.samples[row]:
                self.last_tokens[slot] = sample(read[-1])
                sampled.append(self.last_tokens[slot])
        return sampled


@dataclass
class Load:
    prompts: list[list[int]]
    params: list[SamplingParams]
    arrivals: list[int]  # the step before which each request is added
    aborts: dict[int, list[tuple[int, bool]]]  # step -> (request, while that step is in flight)
    page_size: int
    num_pages: int
    max_num_seqs: int
    budget: int
    max_model_len: int
    prefix_cache: bool

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
        arrivals=[draw(st.sampled_from([0, 0, 1, 2, 9])) for _ in range(count)],
        aborts={},
        page_size=page_size,
        num_pages=1,
        max_num_seqs=max_num_seqs,
        budget=max_num_seqs + draw(st.integers(0, 12)),
        max_model_len=draw(st.sampled_from([8, 24, 64, 64])),
        prefix_cache=draw(st.booleans()),
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
        )
        self.model = FakeModel(load.page_size, load.num_pages, load.max_num_seqs)
        self.requests = [
            Request(str(i), list(prompt), params, seed=i, arrival_s=0.0)
            for i, (prompt, params) in enumerate(zip(load.prompts, load.params, strict=True))
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
        decoding = [r for r in self.requests if r.slot >= 0 and r.num_tokens - r.num_computed == 1]
        resident = {r: r.num_computed for r in self.requests if r.slot >= 0}
        schedule = self.scheduler.schedule()
        self.scheduler.check_invariants()
        if not schedule.seqs:
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
        sampled = self.model.run(number, schedule, self.pool)
        self.abort(number, in_flight=True)
        self.finished += self.scheduler.update(schedule, sampled, now_s=float(number))
        self.scheduler.check_invariants()

    def drive(self) -> None:
        last = max(self.load.arrivals)
        for number in range(2_000):
            for index, arrival in enumerate(self.load.arrivals):
                if arrival == number:
                    self.add(index)
            if number > last and not self.scheduler.has_work:
                return
            self.step(number)
        raise AssertionError("no end in 2,000 steps")


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
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
        tokens, reason = reference(load.prompts[index], load.params[index], load.max_model_len)
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
    tokens, _ = reference(prompt, params, 64)
    assert [r.output_ids for r in run.requests] == [tokens] * copies
    if warm:
        assert run.requests[1].cached_tokens == (prompt_len - 1) // page_size * page_size
