"""transformers' greedy continuation, token by token in float32."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from tests.support.checkpoints import reference_logits


@cache
def greedy_reference(path: Path, prompt: tuple[int, ...], tokens: int) -> tuple[int, ...]:
    """The `tokens` ids that transformers' argmax adds to the prompt; EOS does not end it."""
    ids = list(prompt)
    for _ in range(tokens):
        ids.append(int(reference_logits(path, ids)[-1].argmax()))
    return tuple(ids[len(prompt) :])
