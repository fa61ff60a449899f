"""Triton kernels on a GPU against their PyTorch references."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.store_kv import store_kv
from engine.layers import RMSNorm, RotaryEmbedding, SiluAndMul, apply_rotary
from engine.sampler import Sampler

pytestmark = pytest.mark.gpu


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
    store_kv(k, v, *caches, slots)
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
    # Two roundings, each of which may fall to the other side: 2 units in the last place.
    close = {} if dtype == torch.float32 else {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-5}
    torch.testing.assert_close(own.cpu(), expected, **close)
    torch.testing.assert_close(own_added.cpu(), added, **close)
    assert torch.equal(own_total.cpu(), total)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_heads_and_activation_are_the_formulas(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    norm = RMSNorm(128, 1e-6, dtype=dtype, device="cpu")
    with torch.no_grad():
        norm.weight.normal_(1.0, 0.3)
    q = torch.randn(19, 32 * 128).to(dtype)[:, : 16 * 128].view(19, 16, 128)
    rotary = RotaryEmbedding(128, 5000, 1e6, "cpu")(torch.arange(4000, 4019))
    x = torch.randn(19, 2 * 3072).to(dtype)
    expected = (norm(q), apply_rotary(q, rotary), SiluAndMul()(x))
    norm = norm.cuda()
    own = (norm(q.cuda()), apply_rotary(q.cuda(), rotary.cuda()), SiluAndMul()(x.cuda()))
    for found, wanted in zip(own, expected, strict=True):
        torch.testing.assert_close(found.cpu(), wanted)
