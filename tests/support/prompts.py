"""Random prompts, of lengths round the ends of pages."""

from __future__ import annotations

import random

PAGE = 8  # tokens, as in small_engine
# Around every boundary of a page.
LENGTHS = (1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 3 * PAGE + 5)


def prompts_of(lengths: tuple[int, ...], vocab: int = 97, seed: int = 0) -> list[list[int]]:
    """Token ids, a prompt of each length; the same for a seed."""
    rng = random.Random(seed)
    return [[rng.randrange(vocab) for _ in range(n)] for n in lengths]
