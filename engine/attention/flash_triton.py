"""Prompts by flash-attn 2, decoding by the engine's own kernel.

Measured on an H200 in CUDA graphs, pages of 256, 16 or 32 query and 8 K/V heads, flash-attn 2
against the own kernel: one sequence of 144 to 2,048 keys 16 to 18 us against 5 to 9 (its second
kernel, which combines splits, takes 9 us in a step whatever the lengths), 16 of 1,024 keys 36
against 21, 256 of 144 keys 73 against 47, 256 of 1,024 keys 267 against 245. At 8,192 keys
flash-attn 2 was 12 and 17 % ahead at 16 and 32 sequences, which were split in 4 and 2 then and are
not split now (not measured); a captured graph does not know the length.

Shapes: T rows, S sequences, h query heads, D head_dim.
"""

from __future__ import annotations

import torch

from engine.attention import flash, triton_paged
from engine.attention.paged import Paged

PAGE_MULTIPLE = flash.PAGE_MULTIPLE


def attend(q: torch.Tensor, paged: Paged, scale: float) -> torch.Tensor:
    """As in Paged."""
    num_seqs, _, _, num_decodes = paged.counts()
    if num_decodes == num_seqs:
        out = torch.empty_like(q[:num_seqs], memory_format=torch.contiguous_format)
    else:
        out = flash.chunks(q, paged, scale)
    triton_paged.decode(q, paged, out[:num_decodes], scale)
    return out
