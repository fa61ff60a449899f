"""Products of few rows on a GPU, plain and launched early, and logits of the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.kernels.linear_triton import linear_triton, tile
from engine.layers import SiluAndMul
from tests.gpu.test_numerics import (
    FACTOR,
    PROMPT,
    compile_cache,
    references,
    relative,
    token_ids,
)
from tests.support.probe import Probe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0),
        reason="early launches need compute capability 9.0",
    ),
]

__all__ = ["compile_cache", "references"]

SHAPES = [(4096, 1024), (1024, 2048), (1024, 3072), (2048, 1024), (1000, 1544), (4096, 12288)]


@pytest.mark.parametrize(
    ("dtype", "dependent"),
    [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, False),
     (torch.float32, False)],
)  # fmt: skip
@pytest.mark.parametrize("rows", [1, 2, 8, 17, 32, 64])
def test_a_product_is_rounded_once(rows: int, dtype: torch.dtype, dependent: bool) -> None:
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
        found = linear_triton(x, weight, bias, dependent=dependent)
        torch.testing.assert_close(found.double(), exact, rtol=2 * eps, atol=max(eps, 1e-4))
        gated = linear_triton(x, weight, gated=True, dependent=dependent)
        chosen = tile(rows, size // 2, inner, dtype.itemsize, True)
        reference = SiluAndMul()(linear_triton(x, weight, chosen=chosen))
        torch.testing.assert_close(gated, reference, rtol=4 * eps, atol=max(4 * eps, 1e-4))


def test_early_launches_read_what_the_kernel_before_wrote() -> None:
    """A chain in a CUDA graph: each product reads the one before, and writes where an earlier one
    was read; 200 replays give the same bits as launches one by one."""
    torch.manual_seed(0)
    size = 1024
    weights = torch.randn(40, size, size, device="cuda", dtype=torch.bfloat16) / size**0.5
    first = torch.randn(4, size, device="cuda", dtype=torch.bfloat16)
    ring = [torch.empty_like(first) for _ in range(3)]

    def chain(dependent: bool) -> torch.Tensor:
        x = first
        for place, weight in enumerate(weights):
            out = ring[place % 3]
            x = linear_triton(x, weight, dependent=dependent, out=out)
        return x

    expected = chain(False).clone()
    chain(True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        last = chain(True)
    for _ in range(200):
        last.zero_()
        graph.replay()
        assert torch.equal(last, expected)


FAST: list[dict[str, Any]] = [
    {"linear": "triton"},
    {"launch": "dependent"},
    {"linear": "triton", "launch": "dependent", "fused": "store"},
    {"linear": "triton", "launch": "dependent", "compile": "model"},
]


@pytest.mark.parametrize("options", FAST)
@pytest.mark.parametrize("eager", [True, False])
def test_logits_are_as_near_float32_as_transformers(
    qwen3_0_6b: Path,
    references: dict[str, torch.Tensor],
    options: dict[str, Any],
    eager: bool,
    compile_cache: Path,
) -> None:
    exact = references["float32"]
    theirs = relative(references["bfloat16"], exact)
    probe = Probe(qwen3_0_6b, enforce_eager=eager, cache_dir=str(compile_cache), **options)
    own = probe.teacher_forced(token_ids(), PROMPT)
    probe.close()
    assert own is not None
    print(f"{options}: relative error {relative(own, exact):.2e}, theirs {theirs:.2e}")
    assert relative(own, exact) <= FACTOR * theirs
