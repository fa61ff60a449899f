"""Every setting of `fused` on a GPU: the kernel that stores, and logits of the whole model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.kernels.store_kv import store_kv
from engine.layers import RMSNorm, RotaryEmbedding, norm_and_rotate, norm_rotate_store
from tests.support.numerics import FACTOR, PROMPT, relative, token_ids
from tests.support.probe import Probe

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(16, 8, 128), (40, 8, 128), (14, 2, 64), (3, 1, 24)]
)
@pytest.mark.parametrize("has_norm", [True, False])
def test_one_kernel_is_the_two_bit_for_bit(
    heads: int, kv_heads: int, head_dim: int, has_norm: bool, dtype: torch.dtype
) -> None:
    """Its two are held against the formulas in test_kernels.py."""
    torch.manual_seed(0)
    norms = [RMSNorm(head_dim, 1e-6, dtype=dtype, device="cuda") for _ in "qk"]
    for norm in norms:
        norm.weight.normal_(1.0, 0.3)
    pair = (norms[0], norms[1]) if has_norm else (None, None)
    qkv = torch.randn(19, heads + 2 * kv_heads, head_dim, device="cuda").to(dtype)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    rotary = RotaryEmbedding(head_dim, 5000, 1e6, "cuda")(torch.arange(4000, 4019, device="cuda"))
    slots = torch.randperm(6 * 16, device="cuda")[:19]
    own, reference = torch.zeros(2, 2, 6, 16, kv_heads, head_dim, device="cuda", dtype=dtype)
    found = norm_rotate_store(q, k, v, *pair, rotary, own[0], own[1], slots)  # type: ignore[call-arg]
    expected, stored = norm_and_rotate(q, k, *pair, rotary)  # type: ignore[call-arg]
    store_kv(stored, v, reference[0], reference[1], slots)
    assert torch.equal(found, expected) and torch.equal(own, reference)


@pytest.mark.parametrize("eager", [True, False])
def test_logits_are_as_near_float32_as_transformers(
    qwen3_0_6b: Path, references: dict[str, torch.Tensor], eager: bool
) -> None:
    """And `store` computes what `layers` does."""
    exact, found = references["float32"], {}
    theirs = relative(references["bfloat16"], exact)
    for fused in ("none", "layers", "store"):
        probe = Probe(qwen3_0_6b, attention="triton", enforce_eager=eager, fused=fused)
        own = probe.teacher_forced(token_ids(), PROMPT)
        probe.close()
        assert own is not None
        print(f"fused={fused}: relative error {relative(own, exact):.2e}, theirs {theirs:.2e}")
        assert relative(own, exact) <= FACTOR * theirs
        found[fused] = own
    assert torch.equal(found["layers"], found["store"])
