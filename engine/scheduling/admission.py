"""Limits of a request that only the model and the cache tell, checked when it is queued."""

from __future__ import annotations

from engine.errors import RequestError
from engine.requests.request import Request
from engine.scheduling.blocks import BlockPool


def check_tokens(request: Request, vocab_size: int) -> None:
    """Raises RequestError where a prompt token is none of the model's."""
    bad = next((t for t in request.prompt_ids if not 0 <= t < vocab_size), None)
    if bad is not None:
        raise RequestError(f"prompt token id {bad}: this model's ids are in [0, {vocab_size})")


def check_size(request: Request, max_model_len: int, pool: BlockPool) -> None:
    """Raises RequestError where a request can never be served, however long it waits."""
    prompt, most = len(request.prompt_ids), request.params.max_tokens
    if prompt == 0:
        raise RequestError("the prompt has no tokens: give at least 1")
    if prompt >= max_model_len:
        raise RequestError(
            f"the prompt has {prompt} tokens, but max_model_len={max_model_len} allows "
            f"{max_model_len - 1} and one of output: shorten it or raise max_model_len"
        )
    # The last sampled token is never fed back, so it needs no K/V.
    pages = pool.pages_for(min(prompt + most, max_model_len) - 1)
    if pages > pool.num_pages:
        raise RequestError(
            f"a prompt of {prompt} tokens with max_tokens={most} needs {pages} pages of "
            f"{pool.page_size} tokens, but the K/V cache has {pool.num_pages}: "
            "shorten the prompt, lower max_tokens or raise num_pages"
        )
