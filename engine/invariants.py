"""What must hold of the scheduler between any two of its calls; for tests."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.scheduler import Scheduler


def check_scheduler(scheduler: Scheduler) -> None:
    """Raises AssertionError on an inconsistent state; linear in everything."""
    running = scheduler._running
    held_back = [request for held in scheduler._held.values() for request in held]
    everyone = [*running, *scheduler._waiting, *held_back]
    assert Counter(everyone) == Counter(scheduler._requests.values())
    assert all(request.finish_reason is None for request in everyone)
    slots = [*scheduler._free_slots, *(request.slot for request in running)]
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
        # A token sampled since the last schedule() has no page yet if it starts a new one.
        most = scheduler._pool.pages_for(request.num_tokens)
        assert scheduler._pool.pages_for(request.num_tokens - 1) <= pages <= most
    held = Counter(page for request in running for page in request.page_ids)
    for page in range(scheduler._pool.num_pages):
        assert scheduler._pool.references(page) == held[page], f"references of page {page}"
    scheduler._pool.check_invariants()
    seqs = scheduler._in_flight.seqs if scheduler._in_flight else []
    assert sum(seq.query_len for seq in seqs) <= scheduler._max_num_batched_tokens
    assert len({seq.request for seq in seqs}) == len(seqs)
    assert scheduler._aborted <= {seq.request for seq in seqs}
    for seq in seqs:
        stop = seq.start + seq.query_len
        assert seq.query_len >= 1 and seq.start == seq.request.num_computed
        assert seq.samples == (stop == seq.request.num_tokens)
        assert stop <= len(seq.request.page_ids) * scheduler._pool.page_size
