"""Scheduler: what a step holds, as hand-made tables of decodes, chunks and admissions."""

from __future__ import annotations

import pytest

from engine.requests.request import FinishReason
from engine.requests.sampling_params import SamplingParams
from engine.scheduling.scheduler import Schedule
from tests.support.scheduling import Engine, table


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
