"""Attention of query rows to tiles of paged keys: what decode and prefill have in common.

Softmax is online, in base 2 (Dao, "FlashAttention-2", 2023). All query heads of a K/V head are rows
of one program, so that each key and value is read once for them.

Shapes: M query rows, N keys of a tile, D head_dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.launch import next_power_of_2

LOG2_E = 1.4426950408889634
MIN_DOT = 16  # the smallest side of a matrix that tl.dot takes on every GPU
_TILE_BYTES = 16384  # of K or V: 64 keys of 128 bf16


@triton.jit
def _page(table_ptr, start, end, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Pages of keys start..start+N-1, or the one page if all lie in one; entries of keys past `end`
    are arbitrary and not read."""
    if PAGE % BLOCK_N == 0:
        page = tl.load(table_ptr + start // PAGE, mask=start < end, other=0)
    else:
        key = start + tl.arange(0, BLOCK_N)
        page = tl.load(table_ptr + key // PAGE, mask=key < end, other=0)
    return page


@triton.jit
def attend_keys(
    q,
    acc,
    peak,
    total,
    k_ptr,
    v_ptr,
    table_ptr,
    kv_head,
    begin,
    end,
    last_key,
    scale,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Takes keys begin..end-1 of one sequence into the running softmax of q [M, D].

    begin is a multiple of N. MASKED: row i sees keys up to last_key[i], and end need not be a
    multiple of N; otherwise every row sees every key. Rows of a page past `end` may hold NaN and
    are not read.
    """
    column = tl.arange(0, BLOCK_D)
    in_head = column < HEAD_DIM
    # Read a tile ahead and carried along: the compiler gives a load that another load waits for a
    # pipeline stage of its own, which would leave K and V without a second buffer.
    page = _page(table_ptr, begin, end, PAGE, BLOCK_N)
    for start in range(begin, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        # 64 bits: a layer's K passes 2^31 elements at 4 GiB of bf16.
        row = page.to(tl.int64) * (PAGE * KV_HEADS * HEAD_DIM)
        row += (key % PAGE) * (KV_HEADS * HEAD_DIM) + kv_head * HEAD_DIM
        offset = row[:, None] + column[None, :]
        inside = in_head[None, :]
        if MASKED:
            inside = inside & (key < end)[:, None]
        k = tl.load(k_ptr + offset, mask=inside, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED:
            scores = tl.where(key[None, :] <= last_key[:, None], scores, float("-inf"))
        # Every row sees the first key of its first tile, so that a peak is finite from there on.
        new_peak = tl.maximum(peak, tl.max(scores, axis=1) * scale)
        weight = tl.exp2(scores * scale - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink + tl.sum(weight, axis=1)
        v = tl.load(v_ptr + offset, mask=inside, other=0.0)
        acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        peak = new_peak
        page = _page(table_ptr, start + BLOCK_N, end, PAGE, BLOCK_N)
    return acc, peak, total


def keys_per_tile(head_dim: int, itemsize: int) -> int:
    """N: as many keys as 16 KiB of K hold, 16 to 128 of them."""
    row = max(MIN_DOT, next_power_of_2(head_dim)) * itemsize
    return min(128, max(MIN_DOT, _TILE_BYTES // row))


def tile_constants(k_cache: torch.Tensor, heads: int, head_dim: int) -> dict[str, int]:
    """What decode and prefill kernels are built for."""
    _, page_size, kv_heads, _ = k_cache.shape
    assert k_cache.is_contiguous()
    return {
        "KV_HEADS": kv_heads,
        "GROUP": heads // kv_heads,
        "HEAD_DIM": head_dim,
        "PAGE": page_size,
        "BLOCK_D": max(MIN_DOT, next_power_of_2(head_dim)),
        "BLOCK_N": keys_per_tile(head_dim, k_cache.element_size()),
    }
