"""Pages that a step has filled, offered to later requests with the same beginning"""

from __future__ import annotations

from engine.requests.request import Request
from engine.scheduling.blocks import BlockPool


def publish_pages(pool: BlockPool, request: Request, start: int, stop: int) -> None:
    """Publishes the pages of a request that became full by computing positions start .. stop-1, the
    tokens of which are known."""
    size, prompt = pool.page_size, len(request.prompt_ids)
    for index in range(start // size, stop // size):
        first, end = index * size, (index + 1) * size
        tokens = request.prompt_ids[first:end]
        if end > prompt:
            tokens = tokens + request.output_ids[max(first - prompt, 0) : end - prompt]
        parent = request.page_ids[index - 1] if index else None
        pool.publish(request.page_ids[index], parent, tokens)
