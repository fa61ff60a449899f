"""Sampler: logits to token ids; the noise depends on seed, position and token id alone."""

from __future__ import annotations

import torch

from engine.kernels import runs_triton
from engine.sampling.philox import philox4x32

_BELOW_ONE = 1.0 - 2.0**-24  # the largest float32 below 1
_SMALLEST = torch.finfo(torch.float32).tiny


class Sampler:
    """Greedy and temperature sampling of a batch; the same operations whatever the rows ask for, no
    host synchronisation, so that it runs alike in eager, compiled and captured form. (StepSampler
    takes a plain argmax instead where the host knows that every row is greedy.)

    A row with temperature T > 0 is sampled by an exponential race: argmax of
    (l - max l) / T - log E, E exponential of rate 1, is distributed as softmax(l / T) (-log E is a
    Gumbel variable). The E of each token comes from a counter-based generator, so a row's token
    does not depend on the rest of the batch, its place in it, or the number of ranks.
    """

    def __call__(
        self,
        logits: torch.Tensor,
        temperatures: torch.Tensor,
        seeds: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """Samples one token for each row.

        Args:
            logits: [N, V], any floating dtype.
            temperatures: [N] float32; 0: the exact argmax, the first index among equals.
            seeds: [N] int64, >= 0.
            positions: [N] int64, position of the token to be sampled in its sequence.

        Returns:
            [N] int64.
        """
        if runs_triton(logits):
            from engine.kernels.sample_triton import sample_triton

            return sample_triton(logits, temperatures, seeds, positions)
        logits = logits.float()
        # A temperature of 0 must not give 0/0 in a row that is not used anyway.
        divisor = temperatures.clamp_min(_SMALLEST).unsqueeze(1)
        shifted = logits - logits.amax(dim=-1, keepdim=True)
        race = shifted / divisor - _exponential(seeds, positions, logits.shape[-1]).log()
        greedy = (temperatures == 0).unsqueeze(1)
        return torch.where(greedy, logits, race).argmax(dim=-1)


def _exponential(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Exponential variables of rate 1, float32 [N, vocab_size], all in [2^-33, 16.7].

    Token t takes k, word t % 4 of counter (t // 4, position_lo, position_hi, 0) under key
    (seed_lo, seed_hi); then u = (k + 1/2) / 2^32 and E = -log(1 - u).
    """
    blocks = torch.arange(-(-vocab_size // 4), device=seeds.device).unsqueeze(0)
    low, high = _halves(positions.unsqueeze(1))
    words = philox4x32((blocks, low, high, torch.zeros_like(low)), _halves(seeds.unsqueeze(1)))
    # [N, V/4, 4] -> [N, V]; a fresh tensor, so that every row is laid out alike.
    integers = torch.stack(words, dim=-1).flatten(1)[:, :vocab_size]
    # In float32 the largest k round to u = 1, whose E would be infinite.
    uniform = ((integers.float() + 0.5) * 2.0**-32).clamp_max(_BELOW_ONE)
    return -torch.log1p(-uniform)


def _halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The lower and the upper 32 bits of non-negative int64."""
    return x & 0xFFFFFFFF, x >> 32
