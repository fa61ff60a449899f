"""Why a request ends: EOS, stop ids and strings, and its length."""

from __future__ import annotations

from collections.abc import Collection

from engine.requests.request import FinishReason, Request


def finish_reason(
    request: Request, eos_token_ids: Collection[int], max_model_len: int
) -> FinishReason | None:
    """Why a request ends with its newest token, None if it goes on; sets `stop_reason`.

    Before `min_tokens` are generated only its length ends a request. Of several reasons that one
    token brings, EOS counts first, then stop ids, then stop strings, then the length.
    """
    params, token = request.params, request.output_ids[-1]
    generated = len(request.output_ids)
    may_stop = generated >= params.min_tokens
    if request.watched is not None:
        request.watched.push(token, may_stop)
    if may_stop:
        if token in eos_token_ids and not params.ignore_eos:
            return FinishReason.STOP
        if token in params.stop_token_ids:
            request.stop_reason = token
            return FinishReason.STOP
        if request.watched is not None and request.watched.found is not None:
            request.stop_reason = request.watched.found
            return FinishReason.STOP
    known = len(request.prompt_ids) + generated  # a step in flight may already add to num_tokens
    if generated >= params.max_tokens or known >= max_model_len:
        return FinishReason.LENGTH
    return None
