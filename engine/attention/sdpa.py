"""Attention by torch's scaled_dot_product_attention over gathered pages: runs everywhere.

Shapes: n sequences, L keys, h query heads, g = h / kv_heads of them to one K/V head, D head_dim.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from engine.attention.paged import Paged


def attend(q: torch.Tensor, paged: Paged, scale: float) -> torch.Tensor:
    """As in Paged, zeros in rows of padding.

    Decoding sequences are one padded call, prompt chunks one call each. A step with chunks reads
    lengths on the host, which waits for a GPU; a step that only decodes does not.
    """
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    k_cache, v_cache, block_tables, seq_lens = paged[:4]
    num_seqs, _, max_len, num_decodes = paged.counts()
    if num_seqs == num_decodes:
        rows = num_decodes
    else:
        lens = seq_lens[:num_seqs].tolist()
        rows_before = paged.cu_seqlens_q[: num_seqs + 1].tolist()
        rows = rows_before[-1]
        max_len = max(lens[:num_decodes], default=0)
        for i in range(num_decodes, num_seqs):
            chunk = slice(rows_before[i], rows_before[i + 1])
            _chunk(q[chunk], k_cache, v_cache, out[chunk], block_tables[i], lens[i], scale)
    if num_decodes:
        n = num_decodes
        _decode(q[:n], k_cache, v_cache, out[:n], block_tables[:n], seq_lens[:n], max_len, scale)
    out[rows:].zero_()
    return out


def _decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_len: int,
    scale: float,
) -> None:
    """One query row a sequence: q, out [n, h, D]; L = max_len."""
    n, heads, head_dim = q.shape
    _, page_size, kv_heads, _ = k_cache.shape
    num_pages = -(-max_len // page_size)
    past_end = torch.arange(num_pages * page_size, device=q.device) >= seq_lens[:, None]
    # Table entries past the end are arbitrary, and so is what stands in a page past the end: a NaN
    # there would survive a weight of zero, so K and V are zeroed as well as masked.
    pages = block_tables[:, :num_pages].masked_fill(past_end[:, ::page_size], 0)

    def gathered(cache: torch.Tensor) -> torch.Tensor:
        found = cache[pages].flatten(1, 2).masked_fill_(past_end[:, :, None, None], 0)
        return found.transpose(1, 2)  # [n, kv_heads, L, D]

    # The g query heads of a K/V head are g query rows that share it: no K/V is repeated.
    grouped = q.unflatten(1, (kv_heads, heads // kv_heads))
    mask = ~past_end[:, None, None, :]
    result = scaled_dot_product_attention(
        grouped, gathered(k_cache), gathered(v_cache), attn_mask=mask, scale=scale
    )
    out.copy_(result.reshape(n, heads, head_dim))


def _chunk(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    block_table: torch.Tensor,
    seq_len: int,
    scale: float,
) -> None:
    """The last rows of one sequence: q, out [rows, h, D]; the last attends to seq_len keys."""
    rows = q.shape[0]
    _, page_size, kv_heads, _ = k_cache.shape
    pages = block_table[: -(-seq_len // page_size)]

    def gathered(cache: torch.Tensor) -> torch.Tensor:
        found = cache[pages].flatten(0, 1)[:seq_len]
        return found.transpose(0, 1).repeat_interleave(q.shape[1] // kv_heads, dim=0)

    causal = rows == seq_len  # else row i sees the cached prefix and i + 1 keys more
    mask = None
    if not causal:
        mask = torch.ones(rows, seq_len, dtype=torch.bool, device=q.device).tril(seq_len - rows)
    result = scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        gathered(k_cache)[None],
        gathered(v_cache)[None],
        attn_mask=mask,
        is_causal=causal,
        scale=scale,
    )
    out.copy_(result[0].transpose(0, 1))
