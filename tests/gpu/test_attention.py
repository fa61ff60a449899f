"""Paged attention by Triton kernels on a GPU: values, captured steps, big pools, no late builds."""

from __future__ import annotations

import math

import pytest
import torch

from engine.attention import triton_paged
from engine.attention.paged import Paged
from engine.kernels import triton_builds
from tests.support.attention import SCALE, build_case, causal_attention

pytestmark = pytest.mark.gpu

# (start, new rows): on both sides of a tile of 64 keys, of a page of 256, of many splits' shares.
SPANS = {
    "decode": [(1, 1), (63, 1), (64, 1), (255, 1), (256, 1), (1030, 1), (4100, 1)],
    "prompts": [(0, 1), (0, 64), (0, 65), (0, 300)],
    "chunks": [(5, 60), (64, 64), (200, 57), (1000, 130)],
    "mixed": [(700, 1), (33, 1), (64, 65), (0, 200), (0, 1)],
}


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    """Weights and results are rounded once each. A float32 score is a sum of up to 256 products:
    9 of 548,864 values were off by up to 1.85e-5 (H200); by TF32 they would be off by 1e-3."""
    bound = 3e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    return {"atol": bound, "rtol": bound}


@pytest.mark.parametrize("spans", SPANS)
@pytest.mark.parametrize("page_size", [1, 16, 64, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_like_float64(spans: str, page_size: int, dtype: torch.dtype) -> None:
    """Rows of padding, NaN in every place that is not a sequence's own."""
    case = build_case(SPANS[spans], page_size, 16, 8, 128, dtype, padding=3).to("cuda")
    result = case.attend("triton")
    torch.testing.assert_close(result.double(), case.expected, **tolerance(dtype))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [
        *((8, 8, 128), (32, 8, 128), (40, 8, 128), (64, 8, 128), (16, 1, 128)),
        *((14, 2, 64), (4, 2, 16), (4, 2, 80), (8, 4, 256)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_shapes(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    case = build_case(SPANS["mixed"], 64, heads, kv_heads, head_dim, dtype).to("cuda")
    result = case.attend("triton")
    torch.testing.assert_close(result.double(), case.expected, **tolerance(dtype))


@pytest.mark.parametrize("seqs", [1, 8, 9, 63, 64, 160, 161, 256])
def test_decodes_of_any_number(seqs: int) -> None:
    """8 K/V heads: splits, none, narrow tiles of 16 keys, wide ones again."""
    spans = [(1 + 37 * place % 700, 1) for place in range(seqs)]
    case = build_case(spans, 64, 32, 8, 128, torch.bfloat16).to("cuda")
    found = case.attend("flash2_triton").double()
    torch.testing.assert_close(found, case.expected, **tolerance(torch.bfloat16))


@pytest.mark.parametrize("backend", ["flash2", "flash2_triton"])
@pytest.mark.parametrize("spans", [*SPANS.values(), [(700, 1), (33, 1), (0, 1), (0, 1)]], ids=str)
def test_prompts_by_flash_attn(spans: list[tuple[int, int]], backend: str) -> None:
    case = build_case(spans, 256, 16, 8, 128, torch.bfloat16).to("cuda")
    found = case.attend(backend).double()
    torch.testing.assert_close(found, case.expected, **tolerance(torch.bfloat16))


@pytest.mark.parametrize("splits", [1, 2, 7, 33, 64])
def test_any_number_of_splits(splits: int) -> None:
    from engine.kernels.decode_triton import paged_decode

    case = build_case(SPANS["decode"], 64, 32, 8, 128, torch.bfloat16).to("cuda")
    case.attend("sdpa")  # stores this step's K/V
    out = torch.full_like(case.q, math.nan)
    tables, lens = case.batch.block_tables, case.batch.seq_lens
    paged_decode(case.q, case.k_cache, case.v_cache, tables, lens, out, SCALE, splits)
    torch.testing.assert_close(out.double(), case.expected, **tolerance(torch.bfloat16))


@pytest.mark.parametrize(("bucket", "page_size"), [(1, 64), (8, 16), (96, 64)])
def test_a_captured_step_follows_the_lengths(bucket: int, page_size: int) -> None:
    """One graph, replayed on other lengths, pages and queries, some rows being padding: the values
    of float64, and bit for bit those of the uncaptured step. What lies past a length is NaN."""
    heads, kv_heads, head_dim, most = 16, 8, 128, 2048
    pages, dtype, device = most // page_size, torch.bfloat16, "cuda"
    size = (bucket * pages + 1, page_size, kv_heads, head_dim)
    k_cache, v_cache = (torch.zeros(size, dtype=dtype, device=device) for _ in "kv")
    q = torch.zeros(bucket, heads, head_dim, dtype=dtype, device=device)
    tables = torch.full((bucket, pages), bucket * pages, dtype=torch.int32, device=device)
    lens = torch.ones(bucket, dtype=torch.int32, device=device)
    starts = torch.zeros(bucket + 1, dtype=torch.int32, device=device)
    meta = torch.tensor([bucket, 1, most, bucket], dtype=torch.int32)

    paged = Paged(k_cache, v_cache, tables, lens, starts, starts, meta)

    def step() -> torch.Tensor:
        return triton_paged.attend(q, paged, SCALE)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    generator = torch.Generator().manual_seed(0)
    for longest in (1, page_size, 65, 700, most):
        count = max(1, bucket - 3)  # the rest is padding, on the dummy page
        chosen = torch.randint(1, longest + 1, (count,), generator=generator)
        chosen[0] = longest
        order = torch.randperm(bucket * pages, generator=generator).view(bucket, pages)
        q.copy_(torch.randn(q.shape, generator=generator))
        lens[:count], tables[:count] = chosen.to(lens), order[:count].to(tables)
        lens[count:], tables[count:] = 1, bucket * pages
        expected = []
        for cache in (k_cache, v_cache):
            cache.fill_(math.nan)
            cache[-1] = 0
        for row in range(count):
            n = int(chosen[row])
            k, v = (
                torch.randn(n, kv_heads, head_dim, generator=generator).to(device, dtype)
                for _ in "kv"
            )
            position = torch.arange(n)
            slots = order[row][position // page_size] * page_size + position % page_size
            for cache, values in ((k_cache, k), (v_cache, v)):
                cache.view(-1, kv_heads, head_dim)[slots.to(device)] = values
            expected.append(causal_attention(q[row : row + 1], k, v))
        graph.replay()
        found = captured[:count]
        torch.testing.assert_close(found.double(), torch.cat(expected), **tolerance(dtype))
        assert torch.equal(captured, step())


def test_pools_past_2_to_the_31_elements() -> None:
    """The last pages of a pool of 4.3 GB against the same sequences in a small one."""
    spans, page_size = [(300, 1), (500, 1), (100, 80)], 256
    small = build_case(spans, page_size, 16, 8, 128, torch.bfloat16).to("cuda")
    expected = small.attend("triton")
    pages = 2**31 // (page_size * 8 * 128) + 8
    shift = pages - len(small.k_cache)
    size = (pages, *small.k_cache.shape[1:])
    big = [torch.full(size, math.nan, device="cuda", dtype=torch.bfloat16) for _ in "kv"]
    for pool, cache in zip(big, (small.k_cache, small.v_cache), strict=True):
        pool[shift:] = cache
    batch = small.batch
    lengths = (batch.seq_lens, batch.cu_seqlens_q, batch.cu_seqlens_k, batch.host_meta)
    paged = Paged(*big, batch.block_tables + shift, *lengths)  # type: ignore[call-arg]
    found = triton_paged.attend(small.q, paged, SCALE)
    assert torch.equal(found, expected)


def test_no_build_follows_a_change_of_lengths_or_numbers() -> None:
    def run(spans: list[tuple[int, int]]) -> None:
        build_case(spans, 64, 16, 8, 128, torch.bfloat16).to("cuda").attend("triton")

    for decodes in (1, 3, 4, 8):  # 32, 10, 8 and 4 splits
        run([(9, 1)] * decodes)
    run([(9, 1), (9, 1), (0, 5)])
    count = triton_builds()
    for spans in ([(700, 1)], [(30, 1)] * 3, [(64, 1)] * 7, [(0, 1)], [(0, 16), (16, 16)]):
        run(spans)
    run([(99, 1), (5, 300), (0, 17)])
    assert triton_builds() == count
