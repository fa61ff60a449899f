"""Triton kernels on a GPU against their PyTorch references."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.execution.prebuild import prebuilding
from engine.kernels import triton_builds
from engine.kernels.store_kv import store_kv
from engine.layers import RMSNorm, RotaryEmbedding, SiluAndMul, norm_and_rotate
from engine.sampling.sampler import Sampler
from tests.gpu.conftest import HEADS
from tests.support.checkpoints import Checkpoints
from tests.support.probe import Probe

pytestmark = pytest.mark.gpu


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    """Two roundings, each of which may fall to the other side: 2 units in the last place."""
    return {} if dtype == torch.float32 else {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-5}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_store_kv_is_the_reference(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(37, 32, 128, device="cuda", dtype=dtype)
    k, v = qkv[:, 16:24], qkv[:, 24:]
    slots = torch.randperm(50 * 16)[:37]
    own = torch.zeros(2, 50, 16, 8, 128, device="cuda", dtype=dtype)
    store_kv(k, v, own[0], own[1], slots.cuda())
    reference = torch.zeros(2, 50, 16, 8, 128, dtype=dtype)
    store_kv(k.cpu(), v.cpu(), reference[0], reference[1], slots)
    assert torch.equal(own.cpu(), reference)


def test_store_kv_past_2_to_the_31_elements() -> None:
    pages, row = 2**31 // (256 * 1024) + 2, (8, 128)
    caches = [torch.zeros(pages, 256, *row, device="cuda", dtype=torch.bfloat16) for _ in "kv"]
    k, v = (torch.randn(2, *row, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    slots = torch.tensor([pages * 256 - 1, 3], device="cuda")
    store_kv(k, v, *caches, slots)  # type: ignore[call-arg]
    for cache, new in zip(caches, (k, v), strict=True):
        flat = cache.view(-1, *row)
        assert torch.equal(flat[slots], new)
        assert int(flat.count_nonzero()) == int(new.count_nonzero())


@pytest.mark.parametrize("vocab", [97, 5000, 151936])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sampler_is_the_reference(vocab: int, dtype: torch.dtype) -> None:
    """log on the GPU and on the CPU may differ in the last place, which decides a race only between
    tokens that are as good as equal."""
    generator = torch.Generator().manual_seed(0)
    rows = 64
    logits = (torch.randn(rows, vocab, generator=generator) * 3).to(dtype)
    temperatures = torch.tensor([0.0, 1.0, 0.6, 1e-6, 2.0, 1e-30, 0.9, 1.3]).repeat(rows // 8)
    seeds = torch.randint(0, 2**62, (rows,), generator=generator)
    positions = torch.randint(0, 40960, (rows,), generator=generator)
    arguments = (logits, temperatures, seeds, positions)
    reference = Sampler()(*arguments)
    own = Sampler()(*(a.cuda() for a in arguments)).cpu()
    greedy = temperatures == 0
    assert torch.equal(own[greedy], logits[greedy].float().argmax(dim=-1))
    assert torch.equal(own[greedy], reference[greedy])
    assert int((own != reference).sum()) <= 1


def test_equal_logits_give_the_first_index() -> None:
    logits = torch.zeros(3, 151936, device="cuda")
    logits[1, 4097:] = 1.0
    logits[2, -1] = 1.0
    zeros = torch.zeros(3, dtype=torch.int64, device="cuda")
    ids = Sampler()(logits, torch.zeros(3, device="cuda"), zeros, zeros)
    assert ids.tolist() == [0, 4097, 151935]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", [1024, 4096, 1000])
def test_norms_are_the_formula(size: int, dtype: torch.dtype) -> None:
    """CUDA tensors take the kernels, CPU tensors the formula."""
    torch.manual_seed(0)
    norm = RMSNorm(size, 1e-6, dtype=dtype, device="cpu")
    with torch.no_grad():
        norm.weight.normal_(1.0, 0.3)
    x, residual = (torch.randn(33, size).to(dtype) for _ in "xr")
    expected, (added, total) = norm(x), norm(x, residual)
    norm = norm.cuda()
    own, (own_added, own_total) = norm(x.cuda()), norm(x.cuda(), residual.cuda())
    torch.testing.assert_close(own.cpu(), expected, **tolerance(dtype))
    torch.testing.assert_close(own_added.cpu(), added, **tolerance(dtype))
    assert torch.equal(own_total.cpu(), total)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_activation_is_the_formula(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(19, 2 * 3072).to(dtype)
    found = SiluAndMul()(x.cuda()).cpu()
    torch.testing.assert_close(found, SiluAndMul()(x), **tolerance(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(16, 8, 128), (40, 8, 128), (14, 2, 64)]
)
@pytest.mark.parametrize("has_norm", [True, False])
def test_norm_and_rotation_are_the_formulas(
    heads: int, kv_heads: int, head_dim: int, has_norm: bool, dtype: torch.dtype
) -> None:
    """Q and K as they come out of the fused projection."""
    torch.manual_seed(0)
    q_norm, k_norm = (RMSNorm(head_dim, 1e-6, dtype=dtype, device="cpu") for _ in "qk")
    with torch.no_grad():
        q_norm.weight.normal_(1.0, 0.3)
        k_norm.weight.normal_(1.0, 0.3)
    qkv = torch.randn(19, heads + 2 * kv_heads, head_dim).to(dtype)
    rotary = RotaryEmbedding(head_dim, 5000, 1e6, "cpu")(torch.arange(4000, 4019))

    def run(device: str) -> tuple[torch.Tensor, torch.Tensor]:
        q, k = qkv.to(device).split([heads, kv_heads, kv_heads], dim=1)[:2]
        norms = (q_norm.to(device), k_norm.to(device)) if has_norm else (None, None)
        return norm_and_rotate(q, k, *norms, rotary.to(device))  # type: ignore[call-arg]

    for expected, found in zip(run("cpu"), run("cuda"), strict=True):
        # rsqrt may differ in the last place there, and with it a value before or after the weight
        # in its rounding: a unit in the last place of 4 to 8 is 4 eps.
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(found.cpu(), expected, atol=8 * eps + 1e-5, rtol=2 * eps)


def test_a_launch_that_is_looked_up_reads_what_it_is_given() -> None:
    """Rows at addresses that are and are not multiples of 16 bytes, in turn and twice: two builds
    of one kernel, launched by Triton first and then by the engine."""
    from engine.kernels.layers_triton import rms_norm_triton

    torch.manual_seed(0)
    memory = torch.randn(9 * 200 + 1, device="cuda", dtype=torch.bfloat16)
    norm = RMSNorm(200, 1e-6, dtype=torch.bfloat16, device="cpu")
    torch.nn.init.normal_(norm.weight)
    weight = norm.weight.cuda()
    for _ in range(2):
        for begin, rows in ((0, 9), (1, 9), (0, 1), (1, 3)):
            x = memory[begin : begin + rows * 200].view(rows, 200)
            own = rms_norm_triton(x, weight, norm.eps)
            torch.testing.assert_close(own.cpu(), norm(x.cpu()), **tolerance(x.dtype))


@pytest.mark.parametrize(
    ("size", "options"),  # sizes whose kernels no other test builds
    [
        (112, {"enforce_eager": True}),
        (224, {"enforce_eager": False}),
        (448, {"enforce_eager": False, "attention": "triton"}),
        (1984, {"enforce_eager": False, "compile": "model"}),
        (4112, {"enforce_eager": True, "compile": "layer"}),
    ],
    ids=str,
)
def test_nothing_is_left_to_build_once_weights_are_loaded(
    checkpoints: Checkpoints,
    compile_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    size: int,
    options: dict[str, Any],
) -> None:
    """Of own kernels: warm-up, capture and steps find what threads built."""
    counts = [triton_builds()]

    @contextmanager
    def counted(*given: Any) -> Iterator[None]:
        with prebuilding(*given):
            yield
        counts.append(triton_builds())

    monkeypatch.setattr("engine.execution.runner.prebuilding", counted)
    path = checkpoints(
        dtype="bfloat16",
        hidden_size=size,
        intermediate_size=3 * size,
        max_position=1024,
        **HEADS,
    )
    probe = Probe(path, cache_dir=str(compile_cache), **options)
    probe.teacher_forced([list(range(30))] * 5, 20)
    probe.close()
    assert counts[0] < counts[1] == triton_builds()
