"""Fused kernels in the interpreter: one that norms, rotates and stores; whole models."""

from __future__ import annotations

import random

import pytest
import torch

from engine import layers
from engine.kernels import Kernels
from engine.kernels.store_kv import store_kv
from engine.layers import RMSNorm, RotaryEmbedding, norm_and_rotate
from engine.models import qwen
from tests.support.checkpoints import Checkpoints, reference_logits
from tests.support.interpreter import require_interpreter
from tests.support.models import logits_of

require_interpreter()

SLOTS = [3, 0, 19, 7, 8, 12, 14]


def rotated(x: torch.Tensor, weight: torch.Tensor | None, positions: torch.Tensor) -> torch.Tensor:
    """The formulas in float64: x [T, h, D], normed with epsilon 1e-6, rotated with base 1e4."""
    wide = x.double()
    if weight is not None:
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * weight.double()
    half = x.shape[-1] // 2
    angle = positions.double()[:, None, None] * 1e4 ** -(torch.arange(half).double() / half)
    a, b = wide.split(half, dim=-1)
    parts = (a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin())
    return torch.cat(parts, dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 16), (10, 2, 24), (9, 9, 6)])
@pytest.mark.parametrize("has_norm", [True, False])
def test_norm_rotation_and_store_in_one(
    heads: int, kv_heads: int, head_dim: int, has_norm: bool, dtype: torch.dtype
) -> None:
    """Bit for bit what norm_and_rotate's kernel and store_kv give, and near float64."""
    from engine.kernels.rotate_triton import norm_and_rotate_triton, norm_rotate_store_triton

    torch.manual_seed(0)
    weights = tuple(torch.randn(head_dim).mul(0.3).add(1).to(dtype) for _ in "qk")
    qkv = torch.randn(7, heads + 2 * kv_heads, head_dim).to(dtype)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    positions = torch.arange(40, 47)
    rotary = RotaryEmbedding(head_dim, 50, 1e4, "cpu")(positions)
    slots = torch.tensor(SLOTS)
    own, reference = torch.full((2, 2, 5, 4, kv_heads, head_dim), 7.0, dtype=dtype).unbind()
    pair = (weights[0], weights[1]) if has_norm else None
    found = norm_rotate_store_triton(q, k, v, pair, 1e-6, rotary, own[0], own[1], slots)
    expected, stored = norm_and_rotate_triton(q, k, pair, 1e-6, rotary)
    store_kv(stored, v, reference[0], reference[1], slots)
    assert torch.equal(found, expected) and torch.equal(own, reference)
    # Rounded up to three times: before the weight, after it, and at the end; the rotary table's
    # angles, up to 46, are float32.
    eps = torch.finfo(dtype).eps
    close = {"rtol": 4 * eps, "atol": 12 * eps + 46 * 2**-23}
    in_cache = own[0].view(-1, kv_heads, head_dim)[slots]
    for values, x, weight in ((found, q, weights[0]), (in_cache, k, weights[1])):
        exact = rotated(x, weight if has_norm else None, positions)
        torch.testing.assert_close(values.double(), exact, **close)


def test_the_plain_formulas_are_what_the_kernels_give() -> None:
    """In bf16 rounding included: at most a unit in the last place, where a sum's order differs."""
    torch.manual_seed(0)
    norms = [RMSNorm(64, 1e-6, dtype=torch.bfloat16, device="cpu") for _ in "qk"]
    for norm in norms:
        norm.weight.normal_(1.0, 0.3)
    qkv = torch.randn(5, 12, 64).bfloat16()
    rotary = RotaryEmbedding(64, 50, 1e4, "cpu")(torch.arange(40, 45))
    plain = norm_and_rotate(qkv[:, :8], qkv[:, 8:10], *norms, rotary, Kernels(fused="none"))
    from engine.kernels.rotate_triton import norm_and_rotate_triton

    pair = (norms[0].weight, norms[1].weight)
    own = norm_and_rotate_triton(qkv[:, :8], qkv[:, 8:10], pair, 1e-6, rotary)
    for found, expected in zip(own, plain, strict=True):
        assert (found != expected).float().mean() < 0.01
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-8)


def test_models_of_every_setting_are_transformers(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks, decodes and padding over pages full of NaN; layers take their kernels as on a GPU."""
    for module in (layers, qwen):
        monkeypatch.setattr(module, "runs_triton", lambda x: True)
    path, rng = checkpoints(num_layers=2), random.Random(1)
    sequences = [[rng.randrange(90) for _ in range(n)] for n in (6, 4)]
    steps = [{0: 3, 1: 3}, {1: 1, 0: 2}, {0: 1}]
    found = {
        fused: logits_of(path, sequences, steps, padding=2, kernels=Kernels(fused))
        for fused in ("none", "layers", "store")
    }
    for ids, *of_each in zip(sequences, *found.values(), strict=True):
        for logits in of_each:
            torch.testing.assert_close(logits, reference_logits(path, ids), atol=1e-4, rtol=0)
        assert torch.equal(of_each[1], of_each[2])
