"""Prompts by flash-attn 4 (Hopper, Blackwell), decoding by the engine's own kernel.

Four prompts of 2,048 tokens ran at 516 TFLOP/s on an H200, by flash-attn 2 at 306. It does not
split K/V there: a decode of one sequence of 8,192 keys took 102 us, by the own kernel 17. Pages are
multiples of 256; a page that is one tile of keys (128 at head_dim 128) would travel by TMA, past a
sequence's end too, and what stands there had to be finite.

Shapes: T rows, S sequences, h query heads, D head_dim.
"""

from __future__ import annotations

import torch

from engine.attention import triton_paged
from engine.attention.paged import Paged

PAGE_MULTIPLE = 256
# Compute capabilities that its paged kernels are written for: 9.0, and 10.x, 11.x.
MAJORS = (9, 10, 11)


def attend(q: torch.Tensor, paged: Paged, scale: float) -> torch.Tensor:
    """As in Paged. A chunk's last row sees all of its sequence's keys, the rows before
    it as many less as they are earlier (the causal mask is aligned to the end)."""
    num_seqs, max_query, max_len, num_decodes = paged.counts()
    decoded = torch.empty_like(q[:num_decodes], memory_format=torch.contiguous_format)
    triton_paged.decode(q, paged, decoded, scale)
    if num_decodes == num_seqs:
        return decoded
    from flash_attn.cute import flash_attn_varlen_func

    chunks = slice(num_decodes, num_seqs)
    starts = paged.cu_seqlens_q[num_decodes : num_seqs + 1]
    found: torch.Tensor
    found, _ = flash_attn_varlen_func(
        q[num_decodes:],
        paged.k_cache,
        paged.v_cache,
        # Each decode before the chunks has one row.
        cu_seqlens_q=starts - num_decodes if num_decodes else starts,
        seqused_k=paged.seq_lens[chunks],
        max_seqlen_q=max_query,
        max_seqlen_k=max_len,
        page_table=paged.block_tables[chunks],
        softmax_scale=scale,
        causal=True,
    )
    return torch.cat((decoded, found)) if num_decodes else found
