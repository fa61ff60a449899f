"""RMSNorm, rotary embedding and SwiGLU's activation as one kernel each.

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
    heads,
    token_stride,
    head_stride,
    size,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a row of `size` values; rows are tokens, or heads of tokens."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    source = x_ptr + (row // heads) * token_stride + (row % heads) * head_stride + column
    x = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + row * size + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(total_ptr + row * size + column, x, mask=inside)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / size + eps)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    normed = (x * scale).to(weight.dtype).to(tl.float32) * weight.to(tl.float32)
    tl.store(out_ptr + row * size + column, normed, mask=inside)


def rms_norm_triton(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [T, N] or [T, h, N] with any strides but a contiguous last dimension -> the same shape."""
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
    assert x.stride(-1) == 1, x.stride()
    size = x.shape[-1]
    heads, head_stride = (x.shape[1], x.stride(1)) if x.ndim == 3 else (1, 0)
    _rms_norm[(x.shape[0] * heads,)](
        x,
        x if residual is None else residual,
        weight,
        out,
        out if total is None else total,
        heads,
        x.stride(0),
        head_stride,
        size,
        eps,
        HAS_RESIDUAL=residual is not None,
        BLOCK=triton.next_power_of_2(size),
        num_warps=1 if size <= 256 else 4,
    )


@triton.jit
def _rotary(
    x_ptr, rotary_ptr, out_ptr, heads, token_stride, head_stride, half, BLOCK: tl.constexpr
):
    """One program a head of a token: pairs (i, i + D/2), in float32."""
    row = tl.program_id(0).to(tl.int64)
    token = row // heads
    column = tl.arange(0, BLOCK)
    inside = column < half
    source = x_ptr + token * token_stride + (row % heads) * head_stride + column
    a = tl.load(source, mask=inside).to(tl.float32)
    b = tl.load(source + half, mask=inside).to(tl.float32)
    cos = tl.load(rotary_ptr + token * 2 * half + column, mask=inside)
    sin = tl.load(rotary_ptr + token * 2 * half + half + column, mask=inside)
    target = out_ptr + row * 2 * half + column
    tl.store(target, a * cos - b * sin, mask=inside)
    tl.store(target + half, b * cos + a * sin, mask=inside)


def apply_rotary_triton(x: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
    """x [T, h, D], rotary [T, 1, D] float32 contiguous -> [T, h, D]."""
    tokens, heads, head_dim = x.shape
    assert x.stride(-1) == 1 and rotary.is_contiguous()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _rotary[(tokens * heads,)](
        x,
        rotary,
        out,
        heads,
        x.stride(0),
        x.stride(1),
        head_dim // 2,
        BLOCK=triton.next_power_of_2(head_dim // 2),
        num_warps=1,
    )
    return out


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
