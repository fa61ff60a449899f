"""Scheduler: hand-made tables and the faults that users met in other engines."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest

from engine.blocks import BlockPool
from engine.errors import RequestError
from engine.request import FinishReason, Request
from engine.sampling_params import SamplingParams
from engine.scheduler import Schedule, Scheduler

EOS = 1
LONG = SamplingParams(max_tokens=60, ignore_eos=True)


class Engine:
    """A scheduler with its pool; `step` computes a step whose every sampled token is `token`."""

    def __init__(
        self,
        *,
        num_pages: int = 64,
        page_size: int = 4,
        prefix_cache: bool = True,
        max_num_seqs: int = 8,
        budget: int = 64,
        max_model_len: int = 4_096,
    ) -> None:
        self.pool = BlockPool(num_pages, page_size, prefix_cache)
        self.scheduler = Scheduler(
            pool=self.pool,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
            eos_token_ids=[EOS],
        )
        self.clock = 0.0

    def add(self, name: str, prompt: list[int] | int, params: SamplingParams = LONG) -> Request:
        """Queues a prompt; a number stands for a prompt of that many tokens unlike all others."""
        if isinstance(prompt, int):
            prompt = [10_000 + sum(name.encode()), *range(100, 100 + prompt - 1)][:prompt]
        request = Request(name, prompt, params, seed=0, arrival_s=0.0)
        self.scheduler.add(request)
        return request

    def schedule(self) -> Schedule:
        schedule = self.scheduler.schedule()
        self.scheduler.check_invariants()
        return schedule

    def update(self, schedule: Schedule, token: int = 5) -> list[Request]:
        self.clock += 1.0
        sampled = [token for seq in schedule.seqs if seq.samples]
        finished = self.scheduler.update(schedule, sampled, self.clock)
        self.scheduler.check_invariants()
        return finished

    def step(self, token: int = 5) -> Schedule:
        schedule = self.schedule()
        self.update(schedule, token)
        return schedule

    def finish_all(self, steps: int = 5_000) -> list[Request]:
        finished: list[Request] = []
        for _ in range(steps):
            if not self.scheduler.has_work:
                return finished
            finished += self.update(self.schedule())
        raise AssertionError(f"work left after {steps} steps")


def table(schedule: Schedule) -> list[tuple[str, int, int, bool]]:
    return [(s.request.request_id, s.start, s.query_len, s.samples) for s in schedule.seqs]


# -- pages and chunks ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "pages"),
    [(3, [1, 1, 2]), (4, [1, 2, 2]), (5, [2, 2, 2]), (8, [2, 3, 3]), (9, [3, 3, 3])],
)
def test_pages_of_prompts_around_a_page_boundary(length: int, pages: list[int]) -> None:
    """B = 4. A sampled token is appended before the next schedule, which then gives it a page."""
    engine = Engine()
    request = engine.add("a", length)
    seen = []
    for _ in pages:
        schedule = engine.schedule()
        seen.append(len(request.page_ids))
        engine.update(schedule)
    assert seen == pages


def test_decodes_then_chunks_then_admissions() -> None:
    engine = Engine(budget=10)
    engine.add("a", 3)
    engine.add("b", 12)
    engine.add("c", 4)
    assert table(engine.step()) == [("a", 0, 3, True), ("b", 0, 7, False)]
    assert table(engine.step()) == [("a", 3, 1, True), ("b", 7, 5, True), ("c", 0, 4, True)]
    assert table(engine.step()) == [("a", 4, 1, True), ("b", 12, 1, True), ("c", 4, 1, True)]


@pytest.mark.parametrize("budget", range(1, 12))
def test_chunks_cover_a_prompt_once_for_every_budget(budget: int) -> None:
    engine = Engine(budget=budget, max_num_seqs=1)
    request = engine.add("a", 11)
    chunks = []
    while not request.output_ids:
        chunks += [(seq.start, seq.query_len, seq.samples) for seq in engine.step().seqs]
    starts = list(range(0, 11, budget))
    assert chunks == [(s, min(budget, 11 - s), s == starts[-1]) for s in starts]


def test_a_full_house_waits_for_a_slot() -> None:
    engine = Engine(max_num_seqs=2)
    short = SamplingParams(max_tokens=2, ignore_eos=True)
    a, b, c = engine.add("a", 3, short), engine.add("b", 3), engine.add("c", 3)
    engine.step()
    assert (len(engine.scheduler._running), engine.scheduler.num_waiting) == (2, 1)
    assert {a.slot, b.slot, c.slot} == {0, 1, -1}
    freed = a.slot
    engine.step()
    assert a.finish_reason is FinishReason.LENGTH
    assert table(engine.step()) == [("b", 4, 1, True), ("c", 0, 3, True)]
    assert c.slot == freed


def test_decodes_do_not_starve_behind_long_prompts() -> None:
    """8 decodes and a 4,000-token prompt arriving in each of 50 steps: every step serves all 8."""
    engine = Engine(num_pages=20_000, page_size=16, max_num_seqs=64, budget=512)
    decodes = [engine.add(f"d{i}", 4) for i in range(8)]
    engine.step()
    for i in range(50):
        engine.add(f"p{i}", 4_000)
        before = [len(r.output_ids) for r in decodes]
        schedule = engine.step()
        assert [len(r.output_ids) for r in decodes] == [n + 1 for n in before]
        assert [seq.request for seq in schedule.seqs[:8]] == decodes
        assert sum(seq.query_len for seq in schedule.seqs) == 512  # and no step is wasted


def test_300_prompts_with_a_budget_for_10() -> None:
    engine = Engine(num_pages=100, max_num_seqs=10, budget=40)
    params = SamplingParams(max_tokens=7, ignore_eos=True)
    requests = [engine.add(f"r{i}", [i, i, i, i], params) for i in range(300)]
    finished = engine.finish_all()
    assert [r.request_id for r in finished] == [f"r{i}" for i in range(300)]
    assert {len(r.output_ids) for r in requests} == {7}
    assert engine.pool.num_free == 100


# -- how requests end ------------------------------------------------------------------------------


def test_eos_is_kept_and_ends_a_request_unless_ignored() -> None:
    engine = Engine()
    plain = engine.add("plain", 3, SamplingParams(max_tokens=3))
    deaf = engine.add("deaf", 3, SamplingParams(max_tokens=3, ignore_eos=True))
    engine.step(token=7)
    engine.step(token=EOS)
    assert (plain.finish_reason, plain.output_ids) == (FinishReason.STOP, [7, EOS])
    assert plain.token_times_s == [1.0, 2.0]
    assert plain.finished_s == 2.0
    assert deaf.finish_reason is None
    engine.step(token=EOS)
    assert (deaf.finish_reason, deaf.output_ids) == (FinishReason.LENGTH, [7, EOS, EOS])


def test_the_models_length_ends_a_request() -> None:
    """max_model_len=512, prompt 500, max_tokens 100: 12 tokens, not a crash at position 513."""
    engine = Engine(num_pages=32, page_size=16, budget=512, max_model_len=512)
    request = engine.add("a", 500, SamplingParams(max_tokens=100, ignore_eos=True))
    engine.finish_all()
    assert (request.finish_reason, len(request.output_ids)) == (FinishReason.LENGTH, 12)


def test_params_shared_by_many_requests_are_left_alone() -> None:
    engine = Engine(num_pages=32, page_size=16, budget=512, max_model_len=512)
    shared = SamplingParams(max_tokens=40, ignore_eos=True)
    copy = replace(shared)
    long, short = engine.add("long", 507, shared), engine.add("short", 10, shared)
    engine.finish_all()
    assert (len(long.output_ids), len(short.output_ids)) == (5, 40)
    assert shared == copy
    assert long.params is short.params is shared


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        (600, 1, r"600 tokens with max_tokens=1 needs 3 pages of 256 tokens, but .* has 2"),
        (500, 14, r"500 tokens with max_tokens=14 needs 3 pages of 256 tokens, but .* has 2"),
        (0, 1, r"no tokens: give at least 1"),
        (1_000, 1, r"1000 tokens, but max_model_len=1000 allows 999 .*: shorten it or raise"),
    ],
)
def test_a_request_that_can_never_be_served_fails_alone(
    prompt: int, max_tokens: int, message: str
) -> None:
    """2 pages of 256: 512 positions, which 500 + 13 tokens just use (the last needs no K/V)."""
    engine = Engine(num_pages=2, page_size=256, budget=512, max_model_len=1_000)
    before = engine.add("before", 500, SamplingParams(max_tokens=13, ignore_eos=True))
    with pytest.raises(RequestError, match=message):
        engine.add("bad", prompt, SamplingParams(max_tokens=max_tokens))
    after = engine.add("after", 10, SamplingParams(max_tokens=3, ignore_eos=True))
    assert engine.finish_all() == [before, after]
    assert (len(before.output_ids), len(after.output_ids)) == (13, 3)


def test_an_id_in_use_is_refused_and_a_finished_one_is_not() -> None:
    engine = Engine()
    engine.add("a", 3, SamplingParams(max_tokens=1))
    with pytest.raises(RequestError, match="request_id='a' is in use"):
        engine.add("a", 3)
    engine.finish_all()
    engine.add("a", 3)


# -- prefix cache ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "cached"), [(3, 0), (4, 0), (5, 4), (7, 4), (8, 4), (9, 8), (12, 8), (13, 12)]
)
def test_a_prompt_seen_before_computes_at_least_one_token(length: int, cached: int) -> None:
    engine = Engine()
    prompt, once = list(range(20, 20 + length)), SamplingParams(max_tokens=1)
    cold = engine.add("cold", prompt, once)
    assert table(engine.step()) == [("cold", 0, length, True)]
    warm = engine.add("warm", prompt, once)
    assert table(engine.step()) == [("warm", cached, length - cached, True)]
    assert (cold.cached_tokens, warm.cached_tokens) == (0, cached)


def test_generated_tokens_are_found_too() -> None:
    """The second turn of a conversation: prompt + answer of the first, then something new."""
    engine = Engine()
    first = engine.add("first", [2, 3, 4, 5, 6], SamplingParams(max_tokens=4, ignore_eos=True))
    engine.finish_all()
    history = first.prompt_ids + first.output_ids
    assert history == [2, 3, 4, 5, 6, 5, 5, 5, 5]
    engine.add("second", [*history, 8, 8])
    # K/V of the first 8 positions stands; the last sampled token never got any.
    assert table(engine.step()) == [("second", 8, 3, True)]


def test_a_prompt_in_the_same_step_shares_only_what_was_computed_before() -> None:
    engine = Engine()
    one, two = engine.add("one", list(range(20, 29))), engine.add("two", list(range(20, 29)))
    assert table(engine.step()) == [("one", 0, 9, True), ("two", 0, 9, True)]
    assert not set(one.page_ids) & set(two.page_ids)
    three = engine.add("three", list(range(20, 29)))
    engine.step()
    assert three.page_ids[:2] == one.page_ids[:2]


def test_without_prefix_cache_every_prompt_is_computed() -> None:
    engine = Engine(prefix_cache=False)
    for name in ("one", "two"):
        request = engine.add(name, list(range(20, 29)), SamplingParams(max_tokens=1))
        assert table(engine.step()) == [(name, 0, 9, True)]
        assert request.cached_tokens == 0


# -- preemption ------------------------------------------------------------------------------------


def preempted_pair(**kwargs: Any) -> tuple[Engine, Request, Request]:
    """Two requests of 7 tokens in 4 pages of 4; the third page of the older evicts the younger."""
    engine = Engine(num_pages=4, **kwargs)
    old, young = engine.add("old", 7, SamplingParams(max_tokens=6, ignore_eos=True)), None
    young = engine.add("young", 7, SamplingParams(max_tokens=6, ignore_eos=True))
    engine.step()
    engine.step()  # position 7, the last of the second pages
    assert (old.num_tokens, young.num_tokens) == (9, 9)
    schedule = engine.schedule()
    assert schedule.preempted == [young]
    assert table(schedule) == [("old", 8, 1, True)]
    engine.update(schedule)
    return engine, old, young


def test_the_youngest_is_preempted_and_keeps_its_output() -> None:
    _, _, young = preempted_pair()
    assert young.output_ids == [5, 5]
    assert (young.preemptions, young.num_computed, young.slot) == (1, 0, -1)
    assert (young.page_ids, young.token_on_device, young.finish_reason) == ([], False, None)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_preempted_request_is_recomputed_from_prompt_and_output(prefix_cache: bool) -> None:
    engine, old, young = preempted_pair(prefix_cache=prefix_cache)
    while old.finish_reason is None:
        assert [name for name, *_ in table(engine.step())] == [
            "old"
        ]  # no room for young: no thrash
    schedule = engine.schedule()
    # 9 tokens are known. Without cache all are computed; one of the two pages published before was
    # taken by the older request (tails go first), so the cache still has positions 0 to 3.
    start = 4 if prefix_cache else 0
    assert table(schedule) == [("young", start, 9 - start, True)]
    assert young.cached_tokens == 0  # of the first admission
    engine.update(schedule)
    assert young.output_ids == [5, 5, 5]
    engine.finish_all()
    assert (len(old.output_ids), len(young.output_ids)) == (6, 6)


def test_hits_of_a_failed_admission_are_not_kept() -> None:
    """While the preempted request waits, its cached pages are evicted: all of it is recomputed."""
    engine = Engine(num_pages=5, max_num_seqs=3)
    old = engine.add("old", 7, SamplingParams(max_tokens=13, ignore_eos=True))
    young = engine.add("young", 7, SamplingParams(max_tokens=6, ignore_eos=True))
    while not young.preemptions:
        engine.step()
    published = engine.pool.match(young.prompt_ids + young.output_ids, 3)
    assert published  # at its admission attempts there were hits
    engine.step()
    assert engine.scheduler.num_waiting == 1
    while old.finish_reason is None:
        engine.step()  # old grows to five pages, all there are
    assert engine.pool.match(young.prompt_ids + young.output_ids, 3) == []
    schedule = engine.schedule()
    assert table(schedule) == [("young", 0, young.num_tokens - 1, True)]
    engine.update(schedule)
    engine.finish_all()
    assert len(young.output_ids) == 6


def test_preempted_requests_return_in_their_old_order() -> None:
    engine = Engine(num_pages=8, prefix_cache=False)
    few = SamplingParams(max_tokens=24, ignore_eos=True)
    requests = [engine.add(name, 7, few) for name in "abcd"]
    late = engine.add("e", 7, few)
    order: list[str] = []
    while engine.scheduler.has_work:
        for name, start, *_ in table(engine.step()):
            order += [name] if start == 0 else []
    first = [order.index(r.request_id) for r in [*requests, late]]
    assert first == sorted(first)
    finished = sorted([*requests, late], key=lambda r: r.finished_s or 0.0)
    assert finished == [*requests, late]
    assert requests[0].preemptions == 0
    assert sum(r.preemptions for r in requests) >= 3


def test_32_requests_with_a_shared_prefix_in_a_pool_too_small() -> None:
    """0.6 of the pages that they need together; check_invariants compares starts and pages."""
    engine = Engine(num_pages=int(0.6 * (2 + 32 * 3)), max_num_seqs=32)
    prefix, params = list(range(20, 28)), SamplingParams(max_tokens=9, ignore_eos=True)
    requests = [engine.add(f"r{i}", [*prefix, 100 + i], params) for i in range(32)]
    engine.finish_all()
    assert {len(r.output_ids) for r in requests} == {9}
    assert sum(r.preemptions for r in requests) > 0
    assert engine.pool.num_free == engine.pool.num_pages


# -- abort -----------------------------------------------------------------------------------------


def test_abort_while_waiting() -> None:
    engine = Engine(max_num_seqs=1)
    engine.add("a", 3)
    waiting = engine.add("b", 3)
    engine.step()
    assert engine.scheduler.abort("b") is waiting
    assert waiting.finish_reason is FinishReason.ABORT
    assert engine.scheduler.abort("b") is None
    assert engine.scheduler.num_waiting == 0


def test_abort_between_steps() -> None:
    engine = Engine()
    request = engine.add("a", 3)
    engine.step()
    assert engine.scheduler.abort("a") is request
    assert (request.slot, request.page_ids, request.output_ids) == (-1, [], [5])
    assert engine.pool.num_free == 64
    assert not engine.scheduler.has_work


def test_abort_in_flight_drops_the_token() -> None:
    engine = Engine()
    request = engine.add("a", 3)
    engine.step()
    schedule = engine.schedule()
    assert engine.scheduler.abort("a") is None
    assert engine.scheduler.abort("a") is None
    assert request.page_ids  # its step still writes there
    assert engine.update(schedule) == [request]
    assert (request.finish_reason, request.output_ids) == (FinishReason.ABORT, [5])
    assert engine.pool.num_free == 64


def test_abort_of_one_that_the_step_in_flight_leaves_out() -> None:
    engine = Engine(budget=4, max_num_seqs=3)
    engine.add("a", 2)
    half = engine.add("half", 9)
    engine.step()
    other = engine.add("other", 2)
    schedule = engine.schedule()
    assert table(schedule) == [("a", 2, 1, True), ("half", 2, 3, False)]
    assert engine.scheduler.abort("other") is other
    assert engine.scheduler.abort("half") is None
    assert engine.update(schedule) == [half]
    assert half.output_ids == []


def test_abort_when_preempted_in_the_step_in_flight() -> None:
    engine = Engine(num_pages=4)
    engine.add("old", 7, SamplingParams(max_tokens=6, ignore_eos=True))
    young = engine.add("young", 7, SamplingParams(max_tokens=6, ignore_eos=True))
    engine.step()
    engine.step()
    schedule = engine.schedule()
    assert schedule.preempted == [young]
    assert engine.scheduler.abort("young") is young
    assert engine.update(schedule) == []
    engine.finish_all()
    assert engine.pool.num_free == 4


def test_abort_of_an_unknown_id() -> None:
    assert Engine().scheduler.abort("nobody") is None


def test_a_thousand_aborts_in_every_state_free_each_page_once() -> None:
    """The last token is in flight, the prompt is half computed, nothing has run: no double free."""
    engine = Engine(num_pages=12, max_num_seqs=3, budget=4)
    for i in range(1_000):
        prompt = [i, 2, 3, 4, 5, 6]
        request = engine.add(f"r{i}", prompt, SamplingParams(max_tokens=2, ignore_eos=True))
        finished: list[Request] = []
        for _ in range(i % 3):
            engine.step()
        if i % 2:
            schedule = engine.schedule()
            assert engine.scheduler.abort(request.request_id) is None
            finished = engine.update(schedule)
        else:
            aborted = engine.scheduler.abort(request.request_id)
            finished = [aborted] if aborted else []
        assert finished == [request]
        assert request.finish_reason is FinishReason.ABORT
        assert engine.pool.num_free == 12
    assert not engine.scheduler.has_work


# -- the step in flight, and what a step costs -----------------------------------------------------


def test_a_step_is_collected_before_the_next_is_planned() -> None:
    engine = Engine()
    engine.add("a", 3)
    schedule = engine.schedule()
    with pytest.raises(AssertionError, match="in flight"):
        engine.scheduler.schedule()
    with pytest.raises(AssertionError, match="in flight"):
        engine.scheduler.update(Schedule([], []), [], 0.0)
    engine.update(schedule)


def test_with_nothing_to_do_a_schedule_is_empty_and_needs_no_update() -> None:
    engine = Engine()
    assert engine.schedule() == Schedule([], [])
    engine.add("a", 3)
    assert table(engine.schedule()) == [("a", 0, 3, True)]


def calls(run: Callable[[], object]) -> int:
    count = 0

    def profile(frame: FrameType, kind: str, argument: object) -> None:
        nonlocal count
        count += kind in ("call", "c_call")

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


class Watched(list[int]):
    """A prompt that counts how many of its tokens are read."""

    read = 0

    def __getitem__(self, index: Any) -> Any:
        value = super().__getitem__(index)
        self.read += len(value) if isinstance(index, slice) else 1
        return value

    def __iter__(self) -> Any:
        self.read += len(self)
        return super().__iter__()

    def __add__(self, other: Any) -> Any:
        self.read += len(self)
        return super().__add__(other)


def decode_cost(context: int) -> tuple[int, int]:
    """Function calls and prompt tokens read in 16 decode steps behind a context of that length,
    with a head in the queue that does not fit and must not be looked up again each step."""
    engine = Engine(num_pages=context // 4 + 6, budget=context, max_model_len=10 * context)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    running = Request("run", Watched(range(context)), params, seed=0, arrival_s=0.0)
    blocked = Request("head", Watched(range(context)), params, seed=0, arrival_s=0.0)
    blocked.prompt_ids[0] = 7
    engine.scheduler.add(running)
    engine.step()
    engine.scheduler.add(blocked)
    engine.step()
    prompts = [r.prompt_ids for r in (running, blocked)]
    for prompt in prompts:
        prompt.read = 0  # type: ignore[attr-defined]

    def sixteen_steps() -> None:
        for _ in range(16):
            schedule = engine.scheduler.schedule()
            engine.scheduler.update(schedule, [5], 0.0)

    count = calls(sixteen_steps)
    assert len(running.output_ids) == 18
    assert blocked.slot == -1
    return count, sum(p.read for p in prompts)  # type: ignore[attr-defined]


def test_the_work_of_a_decode_step_is_flat_in_context_length() -> None:
    assert decode_cost(64) == decode_cost(8_192)
