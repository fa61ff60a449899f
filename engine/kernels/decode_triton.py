"""Paged decode with split K/V as two Triton kernels; the reference is attention/sdpa.py.

The keys of a sequence are split among programs, and their results combined ("Flash-Decoding", Dao
et al., 2023): one sequence of 8,192 keys and 8 K/V heads would otherwise keep 8 of a GPU's
multiprocessors busy.

Shapes: S sequences, h query heads, D head_dim, M = BLOCK_M rows, N = BLOCK_N keys of a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.key_tiles_triton import LOG2_E, MIN_DOT, attend_keys, tile_constants
from engine.kernels.launch import kernel, next_power_of_2

# Numbers of programs that take tiles of 16 keys, one warp each, where others take 64 keys and 4
# warps. On an H200 with 8 K/V heads: 128 sequences of 144 keys 21.9 against 27.6 us, 64 of 1,024
# keys 65 against 73. Fewer programs wait for memory with too little under way (16 sequences of
# 1,024 keys 41 against 21 us); more do not all fit at once, eleven to a multiprocessor (256 of
# 1,024 keys 287 against 244 us).
NARROW = range(512, 1281)
_NARROW_KEYS = 16
MAX_SPLITS = 64  # so that one kernel combines any number: none is built while a step waits


@triton.jit
def _keys_per_split(seq_len, splits, BLOCK_N: tl.constexpr):
    """Whole tiles, shared out evenly; the last splits of a short sequence get none."""
    return tl.cdiv(tl.cdiv(seq_len, BLOCK_N), splits) * BLOCK_N


@kernel()
def _decode(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    seq_len_ptr,
    out_ptr,
    lse_ptr,
    scale,
    q_stride,
    q_head_stride,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program a (K/V head, sequence, split): its part of the keys. Writes to out [S, h, splits,
    D] and, if there are splits to combine, log2 of the sum of exponentials to lse [S, h, splits].

    Lengths are read on the device: in a CUDA graph the grid stays and they change. A split past the
    end of its sequence ends at once and writes nothing.
    """
    kv_head = tl.program_id(0)
    seq = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    splits = tl.num_programs(2)
    seq_len = tl.load(seq_len_ptr + seq)
    share = _keys_per_split(seq_len, splits, BLOCK_N)
    begin = split * share
    if begin >= seq_len:
        return
    end = tl.minimum(begin + share, seq_len)
    row = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + row
    inside = (row < GROUP)[:, None] & (column < HEAD_DIM)[None, :]
    source = q_ptr + seq * q_stride + head[:, None] * q_head_stride + column[None, :]
    q = tl.load(source, mask=inside, other=0.0)
    acc, peak, total = attend_keys(
        q,
        tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32),
        tl.full([BLOCK_M], float("-inf"), dtype=tl.float32),
        tl.zeros([BLOCK_M], dtype=tl.float32),
        k_ptr,
        v_ptr,
        table_ptr + seq * table_stride,
        kv_head,
        begin,
        end,
        tl.zeros([BLOCK_M], dtype=tl.int32) + (end - 1),
        scale,
        KV_HEADS,
        HEAD_DIM,
        PAGE,
        BLOCK_D,
        BLOCK_N,
        True,
    )
    target = (seq * (KV_HEADS * GROUP) + head) * splits + split
    values = out_ptr + target[:, None] * HEAD_DIM + column[None, :]
    tl.store(values, acc / total[:, None], mask=inside)
    if splits > 1:
        tl.store(lse_ptr + target, peak + tl.log2(total), mask=row < GROUP)


@kernel(plain=("splits",))
def _combine(
    part_ptr,
    lse_ptr,
    seq_len_ptr,
    out_ptr,
    splits,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """One program a (head, sequence): the mean of its splits' results, weighted by their sums of
    exponentials."""
    head = tl.program_id(0)
    seq = tl.program_id(1).to(tl.int64)
    seq_len = tl.load(seq_len_ptr + seq)
    used = tl.cdiv(seq_len, _keys_per_split(seq_len, splits, BLOCK_N))
    split = tl.arange(0, BLOCK_S)
    column = tl.arange(0, BLOCK_D)
    source = (seq * HEADS + head) * splits + split
    lse = tl.load(lse_ptr + source, mask=split < used, other=float("-inf"))
    weight = tl.exp2(lse - tl.max(lse, axis=0))
    weight = weight / tl.sum(weight, axis=0)
    inside = (split < used)[:, None] & (column < HEAD_DIM)[None, :]
    parts = part_ptr + source[:, None] * HEAD_DIM + column[None, :]
    part = tl.load(parts, mask=inside, other=0.0)
    result = tl.sum(part * weight[:, None], axis=0)
    target = out_ptr + (seq * HEADS + head) * HEAD_DIM + column
    tl.store(target, result, mask=column < HEAD_DIM)


def paged_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    splits: int,
) -> None:
    """The first S = len(out) sequences, one row each; arguments as in ForwardBatch, of which only
    the first S count.

    Args:
        q: [T, h, D], T >= S, a contiguous last dimension.
        out: [S, h, D] contiguous, written.
        splits: programs that share a sequence's keys, 1 to MAX_SPLITS.
    """
    assert out.is_contiguous() and q.stride(2) == 1
    seqs, heads, head_dim = out.shape
    tile = tile_constants(k_cache, heads, head_dim)
    block_m, warps = max(MIN_DOT, next_power_of_2(tile["GROUP"])), 4
    if tile["KV_HEADS"] * seqs * splits in NARROW:
        tile["BLOCK_N"] = _NARROW_KEYS
        # one for 16 rows of 128 sums, which is 64 registers a thread
        warps = max(1, block_m * tile["BLOCK_D"] // 2048)
    part, lse = out, out
    if splits > 1:
        part = q.new_empty(seqs, heads, splits, head_dim, dtype=torch.float32)
        lse = q.new_empty(seqs, heads, splits, dtype=torch.float32)
    _decode[(tile["KV_HEADS"], seqs, splits)](
        q,
        k_cache,
        v_cache,
        block_tables,
        seq_lens,
        part,
        lse,
        scale * LOG2_E,
        q.stride(0),
        q.stride(1),
        block_tables.stride(0),
        **tile,
        BLOCK_M=block_m,
        num_warps=warps,
        num_stages=3,
    )
    if splits > 1:
        _combine[(heads, seqs)](
            part,
            lse,
            seq_lens,
            out,
            splits,
            HEADS=heads,
            HEAD_DIM=head_dim,
            BLOCK_D=tile["BLOCK_D"],
            BLOCK_N=tile["BLOCK_N"],
            BLOCK_S=MAX_SPLITS,
            num_warps=4,
        )
