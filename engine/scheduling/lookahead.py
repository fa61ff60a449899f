"""What is known of requests before the steps that hold them are booked"""

from __future__ import annotations

from collections.abc import Sequence

from engine.requests.request import Request
from engine.scheduling.blocks import BlockPool


def remaining(request: Request) -> int:
    """Tokens still to be computed before the request samples; 1 while it decodes."""
    return request.num_tokens - request.num_computed


def ends_in_flight(request: Request, max_model_len: int) -> bool:
    """Whether a token in flight will be the request's last, as far as its length says."""
    if not request.tokens_in_flight:  # every step asks this of every running request
        return False
    done = request.num_generated >= request.params.max_tokens
    return done or request.num_tokens >= max_model_len


def pages_short(pool: BlockPool, decoding: Sequence[Request]) -> bool:
    """Whether the pool has too few pages for the next position of each."""
    full = sum(r.num_computed == len(r.page_ids) * pool.page_size for r in decoding)
    return full > pool.num_free
