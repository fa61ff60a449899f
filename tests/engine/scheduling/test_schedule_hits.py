"""Scheduler: what a prompt reuses of the prefix cache, and what it computes."""

from __future__ import annotations

import pytest

from engine.requests.sampling_params import SamplingParams
from tests.support.scheduling import Engine, table


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


def test_without_prefix_cache_every_prompt_is_computed() -> None:
    engine = Engine(prefix_cache=False)
    for name in ("one", "two"):
        request = engine.add(name, list(range(20, 29)), SamplingParams(max_tokens=1))
        assert table(engine.step()) == [(name, 0, 9, True)]
        assert request.cached_tokens == 0
