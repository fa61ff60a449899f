"""Attention by Triton kernels: paged decode with split K/V, varlen prefill, any page size.

Shapes: T rows, S sequences, h query heads, D head_dim.
"""

from __future__ import annotations

import torch

from engine.attention.paged import Paged

# A page is a tile of keys at head_dim 128 in bf16, so one page id is read a tile. Smaller pages
# make block tables larger, which go to the device each step (at 40,960 tokens and 256 sequences
# 2.6 MB in pages of 16, 0.66 MB in pages of 64); larger ones waste more of a sequence's last page
# and share prefixes in larger units. A key of one head is 256 contiguous bytes whatever the page.
PAGE_SIZE = 64
MAX_HEAD_DIM = 256

# Programs of a decode that fill a GPU: about 2 for each of an H200's 132 multiprocessors. A
# constant, so that results do not depend on the machine.
_PROGRAMS = 256
_MIN_SPLITS = 4


def attend(q: torch.Tensor, paged: Paged, scale: float) -> torch.Tensor:
    """As in Paged, zeros in rows of padding. Nothing is read back from the GPU."""
    from engine.kernels.prefill_triton import paged_prefill

    num_seqs, _, _, num_decodes = paged.counts()
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    decode(q, paged, out[:num_decodes], scale)
    if len(q) > num_decodes:
        chunks = num_seqs - num_decodes
        paged_prefill(q, *paged[:5], out, scale, num_decodes, chunks)
    return out


def decode(q: torch.Tensor, paged: Paged, out: torch.Tensor, scale: float) -> None:
    """The first S sequences, one row each, into out [S, h, D]; S may be 0."""
    from engine.kernels.decode_triton import paged_decode

    if not len(out):
        return
    splits = num_splits(len(out), paged.k_cache.shape[2])
    paged_decode(q, *paged[:4], out, scale, splits)


def num_splits(num_seqs: int, kv_heads: int) -> int:
    """Parts that the keys of each decoding sequence are split into. It depends on what a CUDA graph
    keeps and not on lengths, so that a replay computes what the same padded batch computes
    uncaptured.

    Two or three parts do not pay for the kernel that combines them: 16 sequences of 1,024 keys and
    8 K/V heads took 21 us on an H200, in two parts 23.
    """
    from engine.kernels.decode_triton import MAX_SPLITS

    splits = min(MAX_SPLITS, _PROGRAMS // (num_seqs * kv_heads))
    return splits if splits >= _MIN_SPLITS else 1
