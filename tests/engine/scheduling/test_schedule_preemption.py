"""Scheduler: who is preempted where pages run out, and what is computed again."""

from __future__ import annotations

from typing import Any

import pytest

from engine.requests.request import Request
from engine.requests.sampling_params import SamplingParams
from tests.support.scheduling import Engine, table


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
