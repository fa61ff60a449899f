"""Philox4x32-10, a counter-based random number generator, in plain tensor operations."""

from __future__ import annotations

import torch

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF
_ROUNDS = 10

Words4 = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox4x32(counter: Words4, key: tuple[torch.Tensor, torch.Tensor]) -> Words4:
    """Four random 32-bit words for each counter and key.

    Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011); bit-equal to Random123.
    torch has no unsigned 32-bit multiplication, so words are int64. The 64-bit product wraps, which
    keeps its bits; the shift's sign extension and the upper half that is left on c1 and c3 are
    cleared by the one mask of the next round.

    Args:
        counter: c0 .. c3, int64 in [0, 2^32), shapes that broadcast; key: k0, k1, likewise.

    Returns:
        Four int64 tensors of the broadcast shape, values in [0, 2^32).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for step in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        round_k0 = (k0 + step * _WEYL[0]) & _MASK
        round_k1 = (k1 + step * _WEYL[1]) & _MASK
        c0 = ((product1 >> 32) ^ c1 ^ round_k0) & _MASK
        c2 = ((product0 >> 32) ^ c3 ^ round_k1) & _MASK
        c1, c3 = product1, product0
    return c0, c1 & _MASK, c2, c3 & _MASK
