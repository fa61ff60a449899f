"""Attention by flash-attn 2: paged decode with split K/V, varlen prefill over prefixes.

Shapes: T rows, S sequences, h query heads, D head_dim.
"""

from __future__ import annotations

import torch

from engine.attention.paged import Paged

# FA2's paged kernels read K/V in blocks of 256 rows, and a block must not straddle two pages.
PAGE_MULTIPLE = 256


def attend(q: torch.Tensor, paged: Paged, scale: float) -> torch.Tensor:
    """As in Paged. Nothing is read back from the GPU, with prompt chunks or without."""
    num_seqs, _, _, num_decodes = paged.counts()
    if num_decodes == num_seqs:
        return decode(q[:num_seqs], paged, scale)
    out = chunks(q, paged, scale)
    if num_decodes:
        out[:num_decodes] = decode(q[:num_decodes], paged, scale)
    return out


def chunks(q: torch.Tensor, paged: Paged, scale: float) -> torch.Tensor:
    """As attend(), but only the rows of prompt chunks are computed."""
    from flash_attn import flash_attn_varlen_func

    num_seqs, max_query, max_len, num_decodes = paged.counts()
    # Offsets are absolute rows of q: starting at the first chunk leaves the decodes out.
    of_chunks = slice(num_decodes, num_seqs + 1)
    found: torch.Tensor = flash_attn_varlen_func(
        q,
        paged.k_cache,
        paged.v_cache,
        cu_seqlens_q=paged.cu_seqlens_q[of_chunks],
        cu_seqlens_k=paged.cu_seqlens_k[of_chunks],
        # At 1 flash-attn takes all rows of q for chunks of one row, the decodes' too.
        max_seqlen_q=max(2, max_query),
        max_seqlen_k=max_len,
        softmax_scale=scale,
        causal=True,
        block_table=paged.block_tables[num_decodes:num_seqs],
    )
    return found


def decode(q: torch.Tensor, paged: Paged, scale: float) -> torch.Tensor:
    """The first len(q) sequences, one row each: q [n, h, D] -> [n, h, D]."""
    from flash_attn import flash_attn_with_kvcache

    rows = len(q)
    return flash_attn_with_kvcache(
        q.unsqueeze(1),
        paged.k_cache,
        paged.v_cache,
        cache_seqlens=paged.seq_lens[:rows],
        block_table=paged.block_tables[:rows],
        softmax_scale=scale,
        causal=True,
    ).squeeze(1)
