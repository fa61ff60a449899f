"""What must hold of the scheduler between any two of its calls; for tests."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from engine.requests.request import Request

if TYPE_CHECKING:
    from engine.scheduling.scheduler import Scheduler


def check_scheduler(scheduler: Scheduler) -> None:
    """Raises AssertionError on an inconsistent state; linear in everything."""
    running = scheduler._running
    held_back = [request for held in scheduler._held.values() for request in held]
    everyone = [*running, *scheduler._waiting, *held_back]
    assert Counter(everyone) == Counter(scheduler._requests.values())
    assert all(request.finish_reason is None for request in everyone)
    resident = [*running, *scheduler._surplus]
    slots = [*scheduler._free_slots, *(request.slot for request in resident)]
    assert sorted(slots) == list(range(scheduler._max_num_seqs)), "slots lost or given twice"
    for leader_id in scheduler._held:
        assert not scheduler._requests[leader_id].output_ids, "held for nothing"
    for request in [*scheduler._waiting, *held_back]:
        assert (request.slot, request.num_computed, request.page_ids) == (-1, 0, [])
        assert not request.token_on_device
    for request in running:
        pages = len(request.page_ids)
        assert len(set(request.page_ids)) == pages and 0 <= request.pages_sent <= pages
        assert 0 <= request.num_computed < request.num_tokens <= scheduler._max_model_len
        assert 0 <= request.tokens_in_flight <= request.steps_in_flight <= scheduler._depth
        # A token sampled since the last schedule() has no page yet if it starts a new one.
        most = scheduler._pool.pages_for(request.num_tokens)
        assert scheduler._pool.pages_for(request.num_tokens - 1) <= pages <= most
    held = Counter(page for request in resident for page in request.page_ids)
    for page in range(scheduler._pool.num_pages):
        assert scheduler._pool.references(page) == held[page], f"references of page {page}"
    scheduler._pool.check_invariants()
    flying = Counter[Request]()
    stops: dict[Request, int] = {}
    known = {r: len(r.prompt_ids) + len(r.output_ids) for r in resident}
    for schedule in scheduler._in_flight:
        assert sum(seq.query_len for seq in schedule.seqs) <= scheduler._max_num_batched_tokens
        assert len({seq.request for seq in schedule.seqs}) == len(schedule.seqs)
        for seq in schedule.seqs:
            request, stop = seq.request, seq.start + seq.query_len
            assert seq.query_len >= 1 and seq.start == stops.get(request, seq.start)
            dropped = request in scheduler._surplus  # its token of the step before was, if aborted
            assert dropped or seq.samples == (stop == known[request])
            assert stop <= len(request.page_ids) * scheduler._pool.page_size
            stops[request] = stop
            known[request] += seq.samples
            flying[request] += 1
    assert all(request.num_computed == stop for request, stop in stops.items())
    assert all(request.steps_in_flight == flying[request] for request in [*everyone, *resident])
    assert scheduler._surplus <= set(flying) and scheduler._aborted <= set(flying)
    assert all(request.finish_reason is not None for request in scheduler._surplus)
