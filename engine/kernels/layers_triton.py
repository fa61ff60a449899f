"""RMSNorm and SwiGLU's activation as one kernel each.

For steps that are not compiled; the references are the formulas of engine/layers.py, rounding
included."""

from __future__ import annotations

import torch
import triton.language as tl

from engine.kernels.launch import cdiv, kernel, next_power_of_2


@kernel()
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
        BLOCK=next_power_of_2(size),
        num_warps=1 if size <= 256 else 4,
    )


@kernel()
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
    grid = (tokens, cdiv(size, block))
    _silu_and_mul[grid](x, out, size, BLOCK=block)
    return out
