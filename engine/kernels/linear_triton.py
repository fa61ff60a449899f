"""Products of a few rows with a weight, each reading the weight once; reference: linear.py.

A step of few sequences is bound by reading weights, which a kernel made for larger products need
not do at the memory's pace: of one row cuBLAS reads 4096x1024 at 1.6 TB/s on an H200 and 1024x3072
at 0.9, this one at 2.1 and 1.6 (scripts/linear_tiles.py).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl

from engine.kernels.launch import cdiv, kernel, next_power_of_2
from engine.kernels.linear import MAX_ROWS


@kernel(plain=("rows",))
def _linear(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    rows,
    size,
    inner,
    x_stride,
    out_stride,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program BLOCK_N columns of out [rows, size]: x [rows, inner] by as many of the weight's
    rows. GATED: the weight is [2 * size, inner], and out silu(first) * second.

    BLOCK_M = 1: of one row, without tensor cores.
    """
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.arange(0, BLOCK_M)
    step = tl.arange(0, BLOCK_K)
    there = column < size
    weight_at = weight_ptr + column[:, None].to(tl.int64) * inner + step[None, :]
    second_at = weight_at + size.to(tl.int64) * inner
    if BLOCK_M == 1:
        acc = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    second = acc
    for start in tl.range(0, inner, BLOCK_K, num_stages=STAGES):
        if EVEN:
            weight = tl.load(weight_at + start)
        else:
            inside = there[:, None] & (start + step < inner)[None, :]
            weight = tl.load(weight_at + start, mask=inside, other=0.0)
        if BLOCK_M == 1:
            x = tl.load(x_ptr + start + step, mask=start + step < inner, other=0.0)
            wide = x.to(tl.float32)[None, :]
            acc += weight.to(tl.float32) * wide
        else:
            x_in = (row < rows)[:, None] & (start + step < inner)[None, :]
            x_at = x_ptr + row[:, None] * x_stride + start + step[None, :]
            x = tl.load(x_at, mask=x_in, other=0.0)
            acc = tl.dot(x, weight.T, acc, input_precision="ieee")
        if GATED:
            if EVEN:
                weight = tl.load(second_at + start)
            else:
                weight = tl.load(second_at + start, mask=inside, other=0.0)
            if BLOCK_M == 1:
                second += weight.to(tl.float32) * wide
            else:
                second = tl.dot(x, weight.T, second, input_precision="ieee")
    if BLOCK_M == 1:
        acc = tl.sum(acc, axis=1)[None, :]
        second = tl.sum(second, axis=1)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + column, mask=there, other=0.0).to(tl.float32)[None, :]
    if GATED:
        # rounded where the reference's results are: gate, up, silu(gate)
        dtype = out_ptr.dtype.element_ty
        gate = acc.to(dtype).to(tl.float32)
        silu = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)
        acc = silu * second.to(dtype).to(tl.float32)
    target = out_ptr + row[:, None] * out_stride + column[None, :]
    tl.store(target, acc, mask=(row < rows)[:, None] & there[None, :])


class Tile(NamedTuple):
    """What a program takes: block_n rows of the weight, block_k values of each at a time, of which
    `stages` are under way."""

    block_n: int
    block_k: int
    warps: int
    stages: int


def tile(rows: int, size: int, inner: int, itemsize: int, gated: bool) -> Tile:
    """For a product of so many rows with a weight [size, inner], [2 * size, inner] if gated: by
    scripts/linear_tiles.py on an H200, which named the fastest three for each layer of Qwen3 0.6B
    and 8B over one and two GPUs; one tile serves several layers, so not each has its fastest."""
    if rows == 1:
        if gated:
            wide, deep, stages = (2, 1024, 6) if inner > 1024 else (4, 256, 3)
        else:
            wide, deep = 4, 512 if inner <= 1024 or inner % 1024 else 1024
            stages = 1 if inner <= 1024 else 6
        return Tile(wide, deep * 2 // itemsize, 4, stages)
    warps = 4
    if not gated:
        wide, deep = 32, 128 if inner <= 1024 else 256
        stages = 5 if rows <= 16 else 4
    elif rows <= 16:
        wide, stages = 32, 3 if inner >= 4096 else 5
        deep = 256 if inner >= 4096 and size < 8192 else 128
    elif rows <= 32:
        wide, deep, warps, stages = (32, 128, 2, 3) if size >= 8192 else (16, 256, 2, 3)
    else:
        wide, deep, stages = (32, 64, 3) if size >= 8192 else (32, 64, 5)
    return Tile(wide, deep * 2 // itemsize, warps, stages)


def linear_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    gated: bool = False,
    out: torch.Tensor | None = None,
    chosen: Tile | None = None,
) -> torch.Tensor:
    """x [T, K] with contiguous rows, 1 <= T <= 64, weight [N, K] contiguous -> [T, N]; gated:
    weight [2N, K], gate then up -> silu(x gate^T) * (x up^T) [T, N].

    Sums are float32 and rounded once. `out` [T, N]: where the result goes, rows contiguous.
    """
    rows, inner = x.shape
    size = weight.shape[0] // (2 if gated else 1)
    assert 1 <= rows <= MAX_ROWS and x.stride(1) == 1 and weight.is_contiguous()
    assert weight.shape[1] == inner and (bias is None or (bias.is_contiguous() and not gated))
    if out is None:
        out = x.new_empty(rows, size)
    assert out.shape == (rows, size) and out.stride(1) == 1
    block_n, block_k, warps, stages = chosen or tile(rows, size, inner, x.dtype.itemsize, gated)
    _linear[(cdiv(size, block_n),)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        rows,
        size,
        inner,
        x.stride(0),
        out.stride(0),
        GATED=gated,
        HAS_BIAS=bias is not None,
        EVEN=size % block_n == 0 and inner % block_k == 0,
        BLOCK_M=1 if rows == 1 else max(16, next_power_of_2(rows)),
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        STAGES=stages,
        num_warps=warps,
    )
    return out
