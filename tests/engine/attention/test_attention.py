"""Paged attention against a loop in float64, with everything that must not be read set to NaN."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.store_kv import store_kv
from tests.support.attention import SCALE, Case, build_case

HEAD_DIM = 6


def build(
    spans: list[tuple[int, int]],
    page_size: int,
    heads: int,
    kv_heads: int,
    dtype: torch.dtype = torch.float32,
    padding: int = 0,
) -> Case:
    return build_case(spans, page_size, heads, kv_heads, HEAD_DIM, dtype, padding)


def attend(case: Case) -> torch.Tensor:
    return case.attend("sdpa")


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
