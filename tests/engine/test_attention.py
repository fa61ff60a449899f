"""Paged attention against a loop in float64, with everything that must not be read set to NaN."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

from engine.attention import Attention
from engine.batch import ForwardBatch
from engine.kernels.store_kv import store_kv
from tests.support.batches import Rows, build_batch

HEAD_DIM = 6
SCALE = 0.37


@dataclass
class Case:
    """Sequences whose K/V up to `start` stands in the cache and whose rows from there are new."""

    batch: ForwardBatch
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    expected: torch.Tensor  # [T, h, D] float64


def build(
    spans: list[tuple[int, int]],
    page_size: int,
    heads: int,
    kv_heads: int,
    dtype: torch.dtype = torch.float32,
    padding: int = 0,
) -> Case:
    """spans: (start, number of new rows) of each sequence. The values of a sequence depend on its
    place in the list alone."""
    lengths = [start + new for start, new in spans]
    num_pages = sum(-(-n // page_size) for n in lengths)
    free = torch.randperm(num_pages, generator=torch.Generator().manual_seed(0)).tolist()
    dummy = num_pages
    cache_size = (2, num_pages + 1, page_size, kv_heads, HEAD_DIM)
    k_cache, v_cache = torch.full(cache_size, math.nan, dtype=dtype).unbind()
    rows, new_q, new_k, new_v, expected = [], [], [], [], []
    for seed, ((start, new), length) in enumerate(zip(spans, lengths, strict=True)):
        generator = torch.Generator().manual_seed(seed)
        q, k, v = (
            torch.randn(length, n, HEAD_DIM, generator=generator).to(dtype)
            for n in (heads, kv_heads, kv_heads)
        )
        pages = [free.pop() for _ in range(-(-length // page_size))]
        for p in range(start):
            k_cache[pages[p // page_size], p % page_size] = k[p]
            v_cache[pages[p // page_size], p % page_size] = v[p]
        rows.append(Rows([0] * new, start, pages))
        new_q.append(q[start:])
        new_k.append(k[start:])
        new_v.append(v[start:])
        expected.append(causal_attention(q, k, v)[start:])
    total = sum(new for _, new in spans)
    batch = build_batch(rows, page_size, padded_to=total + padding, dummy_slot=dummy * page_size)
    junk = [torch.full((padding, n, HEAD_DIM), math.nan, dtype=dtype) for n in (heads, kv_heads)]
    zeros = torch.zeros(padding, heads, HEAD_DIM, dtype=torch.float64)
    return Case(
        batch,
        torch.cat([*new_q, junk[0]]),
        torch.cat([*new_k, junk[1]]),
        torch.cat([*new_v, junk[1]]),
        k_cache,
        v_cache,
        torch.cat([*expected, zeros]),
    )


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q [n, h, D], k and v [n, kv_heads, D] -> [n, h, D] in float64, one row and head at a time."""
    out = torch.empty(q.shape, dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    for i in range(q.shape[0]):
        for head in range(q.shape[1]):
            keys, values = (t[: i + 1, head // group].double() for t in (k, v))
            weights = torch.softmax(keys @ q[i, head].double() * SCALE, dim=0)
            out[i, head] = weights @ values
    return out


def attend(case: Case) -> torch.Tensor:
    attention = Attention(SCALE, "sdpa")
    return attention(case.q, case.k, case.v, case.k_cache, case.v_cache, case.batch)


SPANS = {
    "decode": [(1, 1), (16, 1), (7, 1), (30, 1)],
    "prompts": [(0, 5), (0, 1), (0, 16)],
    "chunks": [(4, 5), (3, 1), (16, 16), (1, 7)],
    "mixed": [(9, 1), (15, 1), (0, 7), (5, 6), (0, 1)],
    "one-decode": [(12, 1)],
}
SPANS["chunks"].sort(key=lambda span: span[1])  # one new row after a prefix is a decode: first


@pytest.mark.parametrize("spans", SPANS)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_like_float64(spans: str, page_size: int) -> None:
    case = build(SPANS[spans], page_size, heads=4, kv_heads=2)
    result = attend(case)
    torch.testing.assert_close(result.double(), case.expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (8, 2), (4, 1), (1, 1)])
def test_groups_of_query_heads_read_their_kv_head(heads: int, kv_heads: int) -> None:
    case = build(SPANS["mixed"], 4, heads, kv_heads)
    torch.testing.assert_close(attend(case).double(), case.expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    case = build(SPANS["mixed"], 4, 4, 2, dtype)
    result = attend(case)
    assert result.dtype == dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(result.double(), case.expected, atol=4 * eps, rtol=4 * eps)


@pytest.mark.parametrize("spans", SPANS)
def test_padding_rows_are_zero_and_touch_the_dummy_page_only(spans: str) -> None:
    case = build(SPANS[spans], 4, 4, 2, padding=3)
    pages = case.k_cache[:-1].clone(), case.v_cache[:-1].clone()
    result = attend(case)
    torch.testing.assert_close(result.double(), case.expected, atol=1e-5, rtol=1e-5)
    rows = len(case.q) - 3
    for before, after, new in zip(
        pages, (case.k_cache, case.v_cache), (case.k, case.v), strict=True
    ):
        before.view(-1, *before.shape[2:])[case.batch.slot_mapping[:rows]] = new[:rows]
        torch.testing.assert_close(after[:-1], before, rtol=0, atol=0, equal_nan=True)


def test_result_does_not_depend_on_the_company() -> None:
    """A decoding sequence alone, and beside a much longer one and a chunk."""
    alone = build([(12, 1)], 4, 4, 2)
    beside = build([(12, 1), (40, 1), (0, 9)], 4, 4, 2)
    torch.testing.assert_close(attend(alone)[0], attend(beside)[0], atol=1e-6, rtol=1e-6)


def test_store_kv_writes_each_row_to_its_slot() -> None:
    """From strided K and V, as they come out of the fused projection."""
    qkv = torch.randn(3, 5, 4)
    k, v = qkv[:, 1:3], qkv[:, 3:5]
    k_cache, v_cache = torch.zeros(2, 4, 3, 2, 4).unbind()
    slots = torch.tensor([11, 0, 4])
    store_kv(k, v, k_cache, v_cache, slots)
    for cache, new in ((k_cache, k), (v_cache, v)):
        expected = torch.zeros(12, 2, 4)
        for row, slot in enumerate(slots.tolist()):
            expected[slot] = new[row]
        assert torch.equal(cache, expected.view(4, 3, 2, 4))


def test_operator_mutates_what_its_schema_says() -> None:
    case = build(SPANS["mixed"], 4, 4, 2)
    batch = case.batch
    # The checker copies its arguments with their storages, hence no views here.
    args = (
        case.q,
        case.k,
        case.v,
        case.k_cache.nan_to_num(),
        case.v_cache.nan_to_num(),
        batch.slot_mapping.clone(),
        batch.block_tables,
        batch.seq_lens,
        batch.cu_seqlens_q,
        batch.cu_seqlens_k,
        batch.host_meta,
        SCALE,
        "sdpa",
    )
    torch.library.opcheck(
        torch.ops.rangefinder.paged_attention.default,
        args,
        test_utils=("test_schema", "test_faketensor"),
    )
