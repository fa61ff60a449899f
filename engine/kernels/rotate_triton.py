"""Norm and rotation of Q and K as one kernel, which may write K and V to the cache too.

For steps that are not compiled; the references are the formulas of engine/layers.py, rounding
included, and engine/kernels/store_kv.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.launch import cdiv, kernel, next_power_of_2


@triton.jit
def _heads(
    x_ptr,
    weight_ptr,
    rotary_ptr,
    out_ptr,
    token,
    row,
    head,
    token_stride,
    head_stride,
    eps,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Some heads of one token: normed, rounded, then pairs (i, i + D/2) rotated in float32, and
    written to row `row` of out."""
    column = tl.arange(0, BLOCK)
    in_half = column < HALF
    inside = (head < HEADS)[:, None] & in_half[None, :]
    source = x_ptr + token * token_stride + head[:, None] * head_stride + column[None, :]
    a = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        mean = (tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / (2 * HALF)
        scale = tl.rsqrt(mean + eps)[:, None]
        weight_a = tl.load(weight_ptr + column, mask=in_half, other=0.0)[None, :]
        weight_b = tl.load(weight_ptr + HALF + column, mask=in_half, other=0.0)[None, :]
        # Rounded before the weight multiplies and after, as RMSNorm's results are.
        dtype = weight_a.dtype
        a = (a * scale).to(dtype).to(tl.float32) * weight_a.to(tl.float32)
        b = (b * scale).to(dtype).to(tl.float32) * weight_b.to(tl.float32)
        a, b = a.to(dtype).to(tl.float32), b.to(dtype).to(tl.float32)
    angle = rotary_ptr + token * (2 * HALF) + column
    cos = tl.load(angle, mask=in_half, other=0.0)[None, :]
    sin = tl.load(angle + HALF, mask=in_half, other=0.0)[None, :]
    target = out_ptr + (row * HEADS + head)[:, None] * (2 * HALF) + column[None, :]
    tl.store(target, a * cos - b * sin, mask=inside)
    tl.store(target + HALF, b * cos + a * sin, mask=inside)


@triton.jit
def _copy_heads(
    x_ptr,
    out_ptr,
    token,
    row,
    head,
    token_stride,
    head_stride,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some heads of one token as they are, to row `row` of out."""
    column = tl.arange(0, BLOCK)
    inside = (head < HEADS)[:, None] & (column < HEAD_DIM)[None, :]
    source = x_ptr + token * token_stride + head[:, None] * head_stride + column[None, :]
    target = out_ptr + (row * HEADS + head)[:, None] * HEAD_DIM + column[None, :]
    tl.store(target, tl.load(source, mask=inside), mask=inside)


@kernel()
def _norm_and_rotate(
    q_ptr,
    k_ptr,
    v_ptr,
    q_weight_ptr,
    k_weight_ptr,
    rotary_ptr,
    slot_ptr,
    q_out_ptr,
    k_out_ptr,
    v_out_ptr,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_H: tl.constexpr,
    HAS_NORM: tl.constexpr,
    STORE: tl.constexpr,
):
    """One program BLOCK_H heads of a token: first those of Q, then those of K.

    STORE: K goes to the token's slot of the cache, and so do, in the last programs, V's heads.
    """
    Q_BLOCKS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    KV_BLOCKS: tl.constexpr = (KV_HEADS + BLOCK_H - 1) // BLOCK_H
    # 64 bits: slot * row passes 2^31 elements in a cache of 4 GiB of bf16.
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    head = tl.arange(0, BLOCK_H)
    row = token
    if STORE:
        if block >= Q_BLOCKS:
            row = tl.load(slot_ptr + token)
    if block < Q_BLOCKS:
        _heads(
            q_ptr,
            q_weight_ptr,
            rotary_ptr,
            q_out_ptr,
            token,
            row,
            block * BLOCK_H + head,
            q_stride,
            q_head_stride,
            eps,
            HEADS,
            HALF,
            BLOCK,
            HAS_NORM,
        )
    elif block < Q_BLOCKS + KV_BLOCKS:
        _heads(
            k_ptr,
            k_weight_ptr,
            rotary_ptr,
            k_out_ptr,
            token,
            row,
            (block - Q_BLOCKS) * BLOCK_H + head,
            k_stride,
            k_head_stride,
            eps,
            KV_HEADS,
            HALF,
            BLOCK,
            HAS_NORM,
        )
    elif STORE:
        _copy_heads(
            v_ptr,
            v_out_ptr,
            token,
            row,
            (block - Q_BLOCKS - KV_BLOCKS) * BLOCK_H + head,
            v_stride,
            v_head_stride,
            KV_HEADS,
            2 * HALF,
            2 * BLOCK,
        )


Weights = tuple[torch.Tensor, torch.Tensor]


def norm_and_rotate_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: Weights | None,
    eps: float,
    rotary: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [T, h, D], k [T, kv_heads, D] with any strides but a contiguous last dimension, the norms'
    weights [D] or None for no norm, rotary [T, 1, D] float32 contiguous -> the same shapes."""
    q_out, k_out = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k))
    _launch(q, k, None, weights, eps, rotary, q_out, k_out, None, None)
    return q_out, k_out


def norm_rotate_store_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    weights: Weights | None,
    eps: float,
    rotary: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    """norm_and_rotate_triton, then kernels.store_kv.store_kv of its k and of v, in one kernel; the
    arguments as there. Returns q alone."""
    assert k_cache.is_contiguous() and v_cache.is_contiguous() and v.stride(2) == 1
    q_out = torch.empty_like(q, memory_format=torch.contiguous_format)
    _launch(q, k, v, weights, eps, rotary, q_out, k_cache, v_cache, slot_mapping)
    return q_out


def _launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    weights: Weights | None,
    eps: float,
    rotary: torch.Tensor,
    q_out: torch.Tensor,
    k_out: torch.Tensor,
    v_out: torch.Tensor | None,
    slot_mapping: torch.Tensor | None,
) -> None:
    tokens, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    assert q.stride(2) == k.stride(2) == 1 and rotary.is_contiguous()
    block_h = 8
    kv_blocks = cdiv(kv_heads, block_h) * (1 if v is None else 2)
    _norm_and_rotate[(tokens, cdiv(heads, block_h) + kv_blocks)](
        q,
        k,
        k if v is None else v,
        *(weights or (q, k)),
        rotary,
        slot_mapping,
        q_out,
        k_out,
        v_out,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        0 if v is None else v.stride(0),
        0 if v is None else v.stride(1),
        eps,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HALF=head_dim // 2,
        BLOCK=next_power_of_2(head_dim // 2),
        BLOCK_H=block_h,
        HAS_NORM=weights is not None,
        STORE=v is not None,
    )
