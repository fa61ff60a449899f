"""RMSNorm, rotary embedding and SwiGLU against transformers and float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.layers import RMSNorm, RotaryEmbedding, SiluAndMul, apply_rotary

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def new_norm(size: int, dtype: torch.dtype, eps: float = 1e-6) -> RMSNorm:
    norm = RMSNorm(size, eps, dtype=dtype, device="cpu")
    norm.weight.copy_(torch.randn(size).add(1))
    return norm


def transformers_norm(norm: RMSNorm) -> Any:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    reference = Qwen3RMSNorm(norm.weight.shape[0], eps=norm.eps).to(norm.weight.dtype)
    reference.weight.data.copy_(norm.weight)
    return reference


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_norm_is_bit_equal_to_transformers(dtype: torch.dtype, eps: float) -> None:
    torch.manual_seed(0)
    norm = new_norm(40, dtype, eps)
    x = torch.randn(5, 3, 40).mul(3).to(dtype)
    with torch.inference_mode():
        assert torch.equal(norm(x), transformers_norm(norm)(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_with_residual(dtype: torch.dtype) -> None:
    """The residual is the rounded sum; what is normalised is the sum before rounding."""
    torch.manual_seed(0)
    norm = new_norm(40, dtype)
    x, residual = torch.randn(2, 6, 40).mul(3).to(dtype).unbind()
    before = x.clone(), residual.clone()
    normed, total = norm(x, residual)
    exact = x.double() + residual.double()
    assert torch.equal(total, exact.to(dtype))
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])
    root = exact.pow(2).mean(-1, keepdim=True).add(1e-6).sqrt()
    expected = exact / root * norm.weight.double()
    # One rounding of the normalised value and one of the product.
    torch.testing.assert_close(normed.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=0)


def test_a_compiled_norm_is_the_formula() -> None:
    """A compiler may leave out roundings between fused operations and add none: what it gives is as
    near to float64 as what is written."""
    torch.manual_seed(0)
    norm = new_norm(40, torch.bfloat16)
    x, residual = torch.randn(2, 6, 40).mul(3).bfloat16().unbind()
    with torch.inference_mode():
        normed, total = torch.compile(norm.forward, fullgraph=True)(x, residual)
    exact = x.double() + residual.double()
    assert torch.equal(total, exact.bfloat16())
    expected = exact / exact.pow(2).mean(-1, keepdim=True).add(1e-6).sqrt() * norm.weight.double()
    eps = torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(normed.double(), expected, rtol=2 * eps, atol=0)


def test_norm_with_residual_uses_the_sum_before_rounding() -> None:
    """Of 4096 bfloat16 results nearly all are the float64 one, rounded; had the sum been rounded
    first, every tenth would be one step off."""
    torch.manual_seed(0)
    norm = RMSNorm(64, 1e-6, dtype=torch.bfloat16, device="cpu")
    norm.weight.fill_(1)
    x, residual = torch.randn(2, 64, 64).bfloat16().unbind()
    normed, total = norm(x, residual)

    def expected(exact: torch.Tensor) -> torch.Tensor:
        root = exact.pow(2).mean(-1, keepdim=True).add(1e-6).sqrt()
        return (exact / root).bfloat16()

    assert (normed == expected(x.double() + residual.double())).float().mean() > 0.999
    assert (normed == expected(total.double())).float().mean() < 0.9


@pytest.mark.parametrize("theta", [1e4, 1e6])
@pytest.mark.parametrize("head_dim", [8, 128])
def test_rotary_equals_transformers(head_dim: int, theta: float) -> None:
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

    torch.manual_seed(0)
    positions = torch.tensor([0, 1, 2, 17, 511, 4095])
    q, k = torch.randn(6, 4, head_dim), torch.randn(6, 2, head_dim)
    config = Qwen3Config(head_dim=head_dim, rope_theta=theta)
    cos, sin = Qwen3RotaryEmbedding(config)(q, positions[None])
    expected_q, expected_k = apply_rotary_pos_emb(q, k, cos[0], sin[0], unsqueeze_dim=1)

    rotary = RotaryEmbedding(head_dim, 4096, theta, "cpu")(positions)
    torch.testing.assert_close(apply_rotary(q, rotary), expected_q, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(apply_rotary(k, rotary), expected_k, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_turns_each_pair_by_its_angle(dtype: torch.dtype) -> None:
    """Pair (i, i + D/2) at position p turns by p * theta^(-2i/D); in float64 as complex numbers."""
    torch.manual_seed(0)
    head_dim, theta = 6, 100.0
    positions = torch.tensor([3, 0, 9])
    x = torch.randn(3, 2, head_dim).to(dtype)
    angles = positions[:, None, None] * theta ** (-2 * torch.arange(3).double() / head_dim)
    wide = x.double()
    turned = torch.complex(wide[..., :3], wide[..., 3:]) * torch.exp(1j * angles)
    expected = torch.cat((turned.real, turned.imag), dim=-1)

    result = apply_rotary(x, RotaryEmbedding(head_dim, 10, theta, "cpu")(positions))
    assert result.dtype == dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(result.double(), expected, rtol=eps, atol=8 * eps)


def test_rotary_table_is_float32_and_not_a_weight() -> None:
    rotary = RotaryEmbedding(8, 10, 1e4, "cpu")
    assert rotary.table.dtype == torch.float32
    assert rotary.state_dict() == {}


def test_silu_and_mul() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 14)
    gate, up = x.double()[:, :7], x.double()[:, 7:]
    expected = gate / (1 + torch.exp(-gate)) * up
    torch.testing.assert_close(SiluAndMul()(x).double(), expected, atol=1e-6, rtol=1e-6)
