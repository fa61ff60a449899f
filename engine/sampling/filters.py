"""Top-k, top-p and min-p: how many of the most probable tokens stay, and which they are.

Each of the three keeps a front part of the tokens in order of probability. So sorted values alone
give the number that stays, and the tokens are found by comparing with the last value that stays. A
row's tokens are a function of that row alone, bit for bit, whatever rows stand beside it: sums,
whose rounding would depend on how many rows a kernel is given, are taken over integers.
"""

from __future__ import annotations

import torch

SMALL_K = 1024
"""Up to here the k largest are selected; beyond, the whole vocabulary is sorted."""

_SMALLEST = torch.finfo(torch.float32).tiny
_UNIT = 2.0**40
"""Weight of the most probable token as an integer; 2^23 such tokens fit into an int64."""


def keep_most_probable(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    largest_k: int,
) -> torch.Tensor:
    """Leaves out what each row's top-k, then top-p, then min-p leaves out.

    Args:
        logits: [F, V] float32, the order of tokens and, over the temperature, their probability; of
            equal ones the lower id is the more probable.
        temperatures: [F] float32; 0, which may be what float32 makes of a tiny one, counts as the
            smallest number above.
        top_k: [F] int64 in [1, V]; top_p: [F] float64 in (0, 1]; min_p: [F] float64 in [0, 1].
        largest_k: max(top_k), which the host knows.

    Returns:
        [F, V] the logits, -inf where a token is left out; at least one of a row stays.
    """
    vocab_size = logits.shape[1]
    if largest_k <= min(SMALL_K, vocab_size):
        ordered = logits.topk(largest_k, dim=1).values
    else:
        ordered = logits.sort(dim=1, descending=True).values
    count = _front(ordered, temperatures, top_k, top_p, min_p)
    last = ordered.gather(1, count - 1)  # [F, 1], the smallest logit that stays
    above = logits > last
    equal = logits == last
    spare = count - (ordered > last).sum(dim=1, keepdim=True)  # how many of the equal ones stay
    kept = above | (equal & (equal.cumsum(dim=1, dtype=torch.int32) <= spare))
    return logits.masked_fill(~kept, -torch.inf)


def _front(
    ordered: torch.Tensor,
    temperatures: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """ordered [F, C] logits, falling, C >= top_k -> [F, 1] int64, how many from the front stay."""
    place = torch.arange(ordered.shape[1], device=ordered.device)
    inside = place < top_k.unsqueeze(1)
    divisor = temperatures.clamp_min(_SMALLEST).unsqueeze(1)
    weight = torch.exp((ordered - ordered[:, :1]) / divisor)  # in [0, 1]
    mass = (weight.double() * _UNIT).round().long().masked_fill(~inside, 0)
    before = mass.cumsum(dim=1) - mass  # of the more probable ones
    wanted = top_p.unsqueeze(1) * mass.sum(dim=1, keepdim=True)
    # Tokens whose mass rounds to zero are not left out by a top_p of 1.
    inside &= (before < wanted) | (top_p.unsqueeze(1) == 1)
    inside &= weight >= min_p.float().unsqueeze(1)
    # A row of NaN has no front; it must not read what stands before the first value either.
    return inside.sum(dim=1, keepdim=True).clamp_min(1)
