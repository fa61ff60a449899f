"""RMSNorm, norm and rotation of Q and K, and SwiGLU's activation as one kernel each.

For steps that are not compiled; the references are the formulas of engine/layers.py, rounding
included."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _rms_norm(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    stride,
    size,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a token's row of `size` values."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    x = tl.load(x_ptr + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + row * size + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(total_ptr + row * size + column, x, mask=inside)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / size + eps)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    normed = (x * scale).to(weight.dtype).to(tl.float32) * weight.to(tl.float32)
    tl.store(out_ptr + row * size + column, normed, mask=inside)


def rms_norm_triton(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [T, N], its rows contiguous and any distance apart -> [T, N]."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch_norm(x, None, weight, out, None, eps)
    return out


def add_rms_norm_triton(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, residual [T, N], the residual contiguous -> (norm(x + residual), x + residual)."""
    assert residual.is_contiguous()
    out = torch.empty_like(residual)
    total = torch.empty_like(residual)
    _launch_norm(x, residual, weight, out, total, eps)
    return out, total


def _launch_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    out: torch.Tensor,
    total: torch.Tensor | None,
    eps: float,
) -> None:
    assert x.ndim == 2 and x.stride(1) == 1, x.stride()
    rows, size = x.shape
    _rms_norm[(rows,)](
        x,
        x if residual is None else residual,
        weight,
        out,
        out if total is None else total,
        x.stride(0),
        size,
        eps,
        HAS_RESIDUAL=residual is not None,
        BLOCK=triton.next_power_of_2(size),
        num_warps=1 if size <= 256 else 4,
    )


@triton.jit
def _heads(
    x_ptr,
    weight_ptr,
    rotary_ptr,
    out_ptr,
    token,
    head,
    token_stride,
    head_stride,
    eps,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Some heads of one token: normed, rounded, then pairs (i, i + D/2) rotated in float32."""
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
    target = out_ptr + (token * HEADS + head)[:, None] * (2 * HALF) + column[None, :]
    tl.store(target, a * cos - b * sin, mask=inside)
    tl.store(target + HALF, b * cos + a * sin, mask=inside)


@triton.jit
def _norm_and_rotate(
    q_ptr,
    k_ptr,
    q_weight_ptr,
    k_weight_ptr,
    rotary_ptr,
    q_out_ptr,
    k_out_ptr,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_H: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """One program BLOCK_H heads of a token: first those of Q, then those of K."""
    Q_BLOCKS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    head = tl.arange(0, BLOCK_H)
    if block < Q_BLOCKS:
        _heads(
            q_ptr,
            q_weight_ptr,
            rotary_ptr,
            q_out_ptr,
            token,
            block * BLOCK_H + head,
            q_stride,
            q_head_stride,
            eps,
            HEADS,
            HALF,
            BLOCK,
            HAS_NORM,
        )
    else:
        _heads(
            k_ptr,
            k_weight_ptr,
            rotary_ptr,
            k_out_ptr,
            token,
            (block - Q_BLOCKS) * BLOCK_H + head,
            k_stride,
            k_head_stride,
            eps,
            KV_HEADS,
            HALF,
            BLOCK,
            HAS_NORM,
        )


def norm_and_rotate_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    rotary: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [T, h, D], k [T, kv_heads, D] with any strides but a contiguous last dimension, the norms'
    weights [D] or None for no norm, rotary [T, 1, D] float32 contiguous -> the same shapes."""
    tokens, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    assert q.stride(2) == k.stride(2) == 1 and rotary.is_contiguous()
    q_out, k_out = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k))
    block_h = 8
    blocks = triton.cdiv(heads, block_h) + triton.cdiv(kv_heads, block_h)
    _norm_and_rotate[(tokens, blocks)](
        q,
        k,
        *(weights or (q, k)),
        rotary,
        q_out,
        k_out,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        eps,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HALF=head_dim // 2,
        BLOCK=triton.next_power_of_2(head_dim // 2),
        BLOCK_H=block_h,
        HAS_NORM=weights is not None,
    )
    return q_out, k_out


@triton.jit
def _silu_and_mul(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    """One program a block of one token's row."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(x_ptr + token * 2 * size + column, mask=inside, other=0.0)
    up = tl.load(x_ptr + token * 2 * size + size + column, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    silu = (wide * tl.sigmoid(wide)).to(gate.dtype)  # rounded as F.silu's result is
    product = silu.to(tl.float32) * up.to(tl.float32)
    tl.store(out_ptr + token * size + column, product, mask=inside)


def silu_and_mul_triton(x: torch.Tensor) -> torch.Tensor:
    """x [T, 2I] contiguous, gate then up -> [T, I]."""
    assert x.is_contiguous()
    tokens, size = x.shape[0], x.shape[1] // 2
    out = x.new_empty(tokens, size)
    block = 1024
    _silu_and_mul[(tokens, triton.cdiv(size, block))](x, out, size, BLOCK=block)
    return out
