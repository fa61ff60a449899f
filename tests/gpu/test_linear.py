"""Products of few rows on a GPU, and logits of the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.kernels.linear_triton import linear_triton, tile
from engine.layers import SiluAndMul
from tests.support.numerics import FACTOR, PROMPT, relative, token_ids
from tests.support.probe import Probe

pytestmark = pytest.mark.gpu

SHAPES = [(4096, 1024), (1024, 2048), (1024, 3072), (2048, 1024), (1000, 1544), (4096, 12288)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [1, 2, 8, 17, 32, 64])
def test_a_product_is_rounded_once(rows: int, dtype: torch.dtype) -> None:
    """float32 sums of 12,288 products one after the other are 5e-6 off, and 1e-4 nowhere."""
    torch.manual_seed(0)
    eps, shapes = torch.finfo(dtype).eps, SHAPES
    if dtype is torch.float32:
        shapes = SHAPES[-2:]
    for size, inner in shapes:
        x = torch.randn(rows, inner, device="cuda").to(dtype) / inner**0.5
        weight = torch.randn(size, inner, device="cuda").to(dtype)
        bias = torch.randn(size, device="cuda").to(dtype)
        exact = x.double() @ weight.double().T + bias.double()
        found = linear_triton(x, weight, bias)
        torch.testing.assert_close(found.double(), exact, rtol=2 * eps, atol=max(eps, 1e-4))
        gated = linear_triton(x, weight, gated=True)
        chosen = tile(rows, size // 2, inner, dtype.itemsize, True)
        reference = SiluAndMul()(linear_triton(x, weight, chosen=chosen))
        torch.testing.assert_close(gated, reference, rtol=4 * eps, atol=max(4 * eps, 1e-4))


@pytest.mark.parametrize("scope", ["off", "model"])
@pytest.mark.parametrize("eager", [True, False])
def test_logits_are_as_near_float32_as_transformers(
    qwen3_0_6b: Path,
    references: dict[str, torch.Tensor],
    scope: str,
    eager: bool,
    compile_cache: Path,
) -> None:
    """All products by cuBLAS; those of the default are in test_numerics.py."""
    options: dict[str, Any] = {"linear": "torch", "compile": scope}
    exact = references["float32"]
    theirs = relative(references["bfloat16"], exact)
    probe = Probe(qwen3_0_6b, enforce_eager=eager, cache_dir=str(compile_cache), **options)
    own = probe.teacher_forced(token_ids(), PROMPT)
    probe.close()
    assert own is not None
    print(f"{options}: relative error {relative(own, exact):.2e}, theirs {theirs:.2e}")
    assert relative(own, exact) <= FACTOR * theirs
