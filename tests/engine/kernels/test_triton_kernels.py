"""Triton kernels on CPU tensors, in Triton's interpreter, against their references."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.store_kv import store_kv
from engine.layers import RMSNorm, RotaryEmbedding, SiluAndMul, norm_and_rotate
from engine.sampling.sampler import Sampler
from tests.support.interpreter import require_interpreter

require_interpreter()

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def near(found: torch.Tensor, exact: torch.Tensor, roundings: int) -> None:
    """Within so many roundings of the float64 result."""
    eps = torch.finfo(found.dtype).eps
    torch.testing.assert_close(found.double(), exact, rtol=roundings * eps, atol=4 * eps)


def norm_of(size: int, dtype: torch.dtype) -> RMSNorm:
    norm = RMSNorm(size, 1e-6, dtype=dtype, device="cpu")
    with torch.no_grad():
        norm.weight.normal_(1.0, 0.3)
    return norm


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [24, 128, 1000])
def test_rms_norm(size: int, dtype: torch.dtype) -> None:
    from engine.kernels.layers_triton import add_rms_norm_triton, rms_norm_triton

    torch.manual_seed(0)
    norm = norm_of(size, dtype)
    x, residual = (torch.randn(5, size).to(dtype) for _ in "xr")
    torch.testing.assert_close(rms_norm_triton(x, norm.weight, 1e-6), norm(x))
    own, reference = add_rms_norm_triton(x, residual, norm.weight, 1e-6), norm(x, residual)
    torch.testing.assert_close(own[0], reference[0])
    assert torch.equal(own[1], reference[1])
    total = x.double() + residual.double()
    normed = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-6)
    near(own[0], normed * norm.weight.double(), roundings=2)
    near(own[1], total, roundings=1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 16), (10, 2, 24), (9, 9, 6)])
@pytest.mark.parametrize("has_norm", [True, False])
def test_norm_and_rotation_of_a_fused_projection(
    heads: int, kv_heads: int, head_dim: int, has_norm: bool, dtype: torch.dtype
) -> None:
    """Q and K of [T, q|k|v]: rows of heads at a distance; blocks of 8 heads whole and in part."""
    from engine.kernels.rotate_triton import norm_and_rotate_triton

    torch.manual_seed(0)
    q_norm, k_norm = norm_of(head_dim, dtype), norm_of(head_dim, dtype)
    qkv = torch.randn(7, heads + 2 * kv_heads, head_dim).to(dtype)
    q, k = qkv[:, :heads], qkv[:, heads : heads + kv_heads]
    rotary = RotaryEmbedding(head_dim, 50, 1e4, "cpu")(torch.arange(40, 47))
    weights = (q_norm.weight, k_norm.weight) if has_norm else None
    own = norm_and_rotate_triton(q, k, weights, 1e-6, rotary)
    norms = (q_norm, k_norm) if has_norm else (None, None)
    for found, expected in zip(own, norm_and_rotate(q, k, *norms, rotary), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [40, 1025, 1500])
def test_silu_and_mul(size: int, dtype: torch.dtype) -> None:
    from engine.kernels.layers_triton import silu_and_mul_triton

    torch.manual_seed(0)
    x = torch.randn(3, 2 * size).to(dtype)
    own = silu_and_mul_triton(x)
    torch.testing.assert_close(own, SiluAndMul()(x))
    gate, up = x.double().chunk(2, dim=-1)
    near(own, gate / (1 + (-gate).exp()) * up, roundings=2)


def test_store_kv() -> None:
    from engine.kernels.store_kv_triton import store_kv_triton

    torch.manual_seed(0)
    qkv = torch.randn(6, 8, 24)
    k, v = qkv[:, 4:6], qkv[:, 6:]
    slots = torch.tensor([3, 0, 19, 7, 8, 12])
    own, reference = torch.zeros(2, 5, 4, 2, 24), torch.zeros(2, 5, 4, 2, 24)
    store_kv_triton(k, v, own[0], own[1], slots)
    store_kv(k, v, reference[0], reference[1], slots)
    assert torch.equal(own, reference)


@pytest.mark.parametrize("vocab", [97, 2048, 5000])
def test_sampler(vocab: int) -> None:
    from engine.kernels.sample_triton import sample_triton

    torch.manual_seed(0)
    logits = torch.randn(8, vocab) * 3
    temperatures = torch.tensor([0, 1.0, 0.5, 1e-6, 2, 0.7, 1e-30, 0])
    seeds, positions = torch.randint(0, 2**62, (8,)), torch.randint(0, 5000, (8,))
    own = sample_triton(logits, temperatures, seeds, positions)
    assert torch.equal(own, Sampler()(logits, temperatures, seeds, positions))
