"""Layers without a weight to shard: RMSNorm, rotary embedding, SwiGLU's activation.

Where `fused`, a layer is one Triton kernel on a GPU, unless torch compiles the step; otherwise the
formula as it stands here.

Shapes: T tokens, H hidden, h heads, D head_dim, I intermediate.
"""

from __future__ import annotations

from typing import overload

import torch
import torch.nn.functional as F
from torch import nn

from engine.kernels import USUAL, Kernels, runs_triton
from engine.rope import RopeScaling, rotary_table
from engine.weights import CheckpointTensor, whole


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; statistics in float32."""

    def __init__(
        self,
        size: int,
        eps: float,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        kernels: Kernels = USUAL,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.kernels = kernels
        weight = torch.empty(size, dtype=dtype, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)

    @overload
    def forward(self, x: torch.Tensor) -> torch.Tensor: ...

    @overload
    def forward(
        self, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """norm(x), or with a residual (norm(x + residual), x + residual).

        The sum is formed in float32 and normalised before it is rounded; what is carried on is the
        sum in x's dtype. The normalised value is rounded to x's dtype before the weight multiplies
        it, as in transformers.
        """
        if self.kernels.layers and runs_triton(x):
            from engine.kernels.layers_triton import add_rms_norm_triton, rms_norm_triton

            if residual is None:
                return rms_norm_triton(x, self.weight, self.eps)
            return add_rms_norm_triton(x, residual, self.weight, self.eps)
        if residual is None:
            return self._normed(x.float()).to(x.dtype) * self.weight
        total = x.float() + residual.float()
        return self._normed(total).to(x.dtype) * self.weight, total.to(x.dtype)

    def _normed(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def checkpoint_tensors(self, path: str) -> dict[str, CheckpointTensor]:
        return {f"{path}.weight": whole(self.weight)}


class RotaryEmbedding(nn.Module):
    """The table of cosines and sines, float32 [positions, D]; see rope.rotary_table."""

    table: torch.Tensor

    def __init__(
        self,
        head_dim: int,
        max_positions: int,
        theta: float,
        device: torch.device | str,
        scaling: RopeScaling | None = None,
    ) -> None:
        super().__init__()
        table = rotary_table(head_dim, max_positions, theta, scaling).to(device)
        self.register_buffer("table", table, persistent=False)

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """positions [T] -> their rows [T, 1, D], looked up once a step for all layers."""
        return self.table[positions].unsqueeze(1)


def apply_rotary(x: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
    """Rotates pair (i, i + D/2) of each head of x [T, h, D] by the angle of its position, in
    float32 (transformers' rotate_half layout); rotary [T, 1, D] comes from RotaryEmbedding."""
    cos, sin = rotary.chunk(2, dim=-1)
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def norm_and_rotate(
    q: torch.Tensor,
    k: torch.Tensor,
    q_norm: RMSNorm | None,
    k_norm: RMSNorm | None,
    rotary: torch.Tensor,
    kernels: Kernels = USUAL,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norms each head of q [T, h, D] and k [T, kv_heads, D] where the model has such norms (both or
    neither), then rotates it as apply_rotary does."""
    if kernels.layers and runs_triton(q):
        from engine.kernels.rotate_triton import norm_and_rotate_triton

        weights, eps = _weights(q_norm, k_norm)
        return norm_and_rotate_triton(q, k, weights, eps, rotary)
    if q_norm is not None and k_norm is not None:
        q, k = q_norm(q), k_norm(k)
    return apply_rotary(q, rotary), apply_rotary(k, rotary)


def norm_rotate_store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_norm: RMSNorm | None,
    k_norm: RMSNorm | None,
    rotary: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    """norm_and_rotate, then store_kv, as one Triton kernel -> the normed and rotated q."""
    from engine.kernels.rotate_triton import norm_rotate_store_triton

    weights, eps = _weights(q_norm, k_norm)
    caches = (k_cache, v_cache, slot_mapping)
    return norm_rotate_store_triton(q, k, v, weights, eps, rotary, *caches)


def _weights(
    q_norm: RMSNorm | None, k_norm: RMSNorm | None
) -> tuple[tuple[torch.Tensor, torch.Tensor] | None, float]:
    """(weights, eps) as a kernel takes them."""
    if q_norm is None or k_norm is None:
        return None, 0.0
    assert q_norm.eps == k_norm.eps
    return (q_norm.weight, k_norm.weight), q_norm.eps


class SiluAndMul(nn.Module):
    """x [T, 2I], gate then up -> silu(gate) * up [T, I]."""

    def __init__(self, kernels: Kernels = USUAL) -> None:
        super().__init__()
        self.kernels = kernels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kernels.layers and runs_triton(x):
            from engine.kernels.layers_triton import silu_and_mul_triton

            return silu_and_mul_triton(x)
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up
