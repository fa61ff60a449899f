"""Paged prefill as one Triton kernel; the reference is engine/attention/sdpa.py.

Shapes: T rows, h query heads, g = GROUP of them to a K/V head, D head_dim, M = BLOCK_M rows of a
tile (M // g tokens), N = BLOCK_N keys of a tile.
"""

from __future__ import annotations

import torch
import triton.language as tl

from engine.kernels.key_tiles_triton import LOG2_E, attend_keys, tile_constants
from engine.kernels.launch import cdiv, kernel, next_power_of_2


@kernel(plain=("first", "chunks", "rows"))
def _prefill(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    seq_len_ptr,
    start_ptr,
    out_ptr,
    scale,
    q_stride,
    q_head_stride,
    table_stride,
    first,
    chunks,
    rows,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SEQS: tl.constexpr,
):
    """One program a (tile, K/V head): M // g tokens of one chunk, g rows each.

    Sequences `first`, first + 1, ... are the `chunks` chunks; the first of them starts at row
    `first`, since each sequence before it has one row. Rows from the last chunk's end to `rows` are
    padding and become zero, as if they were one more chunk. Chunk i starts at tile
    (rows before it) // tokens + i, which leaves the chunks before it room for a partly filled tile
    each; tiles that no chunk needs end at once.
    """
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    # The last tiles of a chunk see the most keys; they start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    index = tl.arange(0, SEQS)
    starts = tl.load(start_ptr + first + index, mask=index <= chunks, other=0)
    started = (index <= chunks) & ((starts - first) // TOKENS + index <= tile)
    chunk = tl.sum(started.to(tl.int32), axis=0) - 1
    begin = tl.load(start_ptr + first + chunk)
    token0 = begin + (tile - (begin - first) // TOKENS - chunk) * TOKENS
    row = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_D)
    token = token0 + row // GROUP
    head = kv_head * GROUP + row % GROUP
    stop = rows
    if chunk < chunks:
        stop = tl.load(start_ptr + first + chunk + 1)
    if token0 >= stop:
        return
    filled = (row < TOKENS * GROUP) & (token < stop)
    inside = filled[:, None] & (column < HEAD_DIM)[None, :]
    wide = token.to(tl.int64)
    target = (wide * (KV_HEADS * GROUP) + head)[:, None] * HEAD_DIM + column[None, :]
    if chunk == chunks:
        tl.store(out_ptr + target, tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32), mask=inside)
        return
    source = (wide * q_stride + head * q_head_stride)[:, None] + column[None, :]
    q = tl.load(q_ptr + source, mask=inside, other=0.0)
    seq_len = tl.load(seq_len_ptr + first + chunk)
    before = seq_len - stop  # position of a token less its row
    table = table_ptr + (first + chunk).to(tl.int64) * table_stride
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    # Tiles that the first token sees whole need no mask.
    whole = (before + token0 + 1) // BLOCK_N * BLOCK_N
    end = tl.minimum(before + token0 + TOKENS, seq_len)
    acc, peak, total = attend_keys(
        q,
        acc,
        peak,
        total,
        k_ptr,
        v_ptr,
        table,
        kv_head,
        0,
        whole,
        before + token,
        scale,
        KV_HEADS,
        HEAD_DIM,
        PAGE,
        BLOCK_D,
        BLOCK_N,
        False,
    )
    acc, peak, total = attend_keys(
        q,
        acc,
        peak,
        total,
        k_ptr,
        v_ptr,
        table,
        kv_head,
        whole,
        end,
        before + token,
        scale,
        KV_HEADS,
        HEAD_DIM,
        PAGE,
        BLOCK_D,
        BLOCK_N,
        True,
    )
    tl.store(out_ptr + target, acc / total[:, None], mask=inside)


def paged_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    first: int,
    chunks: int,
) -> None:
    """Sequences first, first + 1, ..., `chunks` of them, whose rows begin at row `first`; the rows
    after them become zero. q and out [T, h, D], out contiguous; the rest as in ForwardBatch."""
    rows, heads, head_dim = q.shape
    tile = tile_constants(k_cache, heads, head_dim)
    # In float32 products run outside the tensor cores, and their operands in registers.
    block_m = max(32 if q.dtype == torch.float32 else 128, next_power_of_2(tile["GROUP"]))
    tiles = cdiv(rows - first, block_m // tile["GROUP"]) + chunks
    _prefill[(tiles, tile["KV_HEADS"])](
        q,
        k_cache,
        v_cache,
        block_tables,
        seq_lens,
        cu_seqlens_q,
        out,
        scale * LOG2_E,
        q.stride(0),
        q.stride(1),
        block_tables.stride(0),
        first,
        chunks,
        rows,
        **tile,
        BLOCK_M=block_m,
        SEQS=next_power_of_2(len(cu_seqlens_q)),
        num_warps=8,
        num_stages=3,
    )
