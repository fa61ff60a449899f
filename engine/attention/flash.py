"""Attention by flash-attn 2: paged decode with split K/V, varlen prefill over prefixes.

Shapes: T rows, S sequences, h query heads, D head_dim.
"""

from __future__ import annotations

import torch

# FA2's paged kernels read K/V in blocks of 256 rows, and a block must not straddle two pages.
PAGE_MULTIPLE = 256


def attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    host_meta: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """q [T, h, D] -> [T, h, D]; the other arguments as in ForwardBatch. K/V of this step's tokens
    must stand in the caches. A step that only decodes reads nothing back from the GPU, and neither
    does one with prompt chunks."""
    num_seqs, _, _, num_decodes = host_meta.tolist()
    cache = (k_cache, v_cache, block_tables, seq_lens)
    if num_decodes == num_seqs:
        return decode(q[:num_seqs], *cache, scale)
    out = chunks(q, *cache, cu_seqlens_q, cu_seqlens_k, host_meta, scale)
    if num_decodes:
        out[:num_decodes] = decode(q[:num_decodes], *cache, scale)
    return out


def chunks(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    host_meta: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Arguments and result as of attend(), but only the rows of prompt chunks are computed."""
    from flash_attn import flash_attn_varlen_func

    num_seqs, max_query, max_len, num_decodes = host_meta.tolist()
    # Offsets are absolute rows of q: starting at the first chunk leaves the decodes out.
    of_chunks = slice(num_decodes, num_seqs + 1)
    found: torch.Tensor = flash_attn_varlen_func(
        q,
        k_cache,
        v_cache,
        cu_seqlens_q=cu_seqlens_q[of_chunks],
        cu_seqlens_k=cu_seqlens_k[of_chunks],
        # At 1 flash-attn takes all rows of q for chunks of one row, the decodes' too.
        max_seqlen_q=max(2, max_query),
        max_seqlen_k=max_len,
        softmax_scale=scale,
        causal=True,
        block_table=block_tables[num_decodes:num_seqs],
    )
    return found


def decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """The first len(q) sequences, one row each: q [n, h, D] -> [n, h, D]."""
    from flash_attn import flash_attn_with_kvcache

    rows = len(q)
    return flash_attn_with_kvcache(
        q.unsqueeze(1),
        k_cache,
        v_cache,
        cache_seqlens=seq_lens[:rows],
        block_table=block_tables[:rows],
        softmax_scale=scale,
        causal=True,
    ).squeeze(1)
