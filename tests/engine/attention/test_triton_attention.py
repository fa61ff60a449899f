"""Paged attention by Triton kernels against a loop in float64, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.attention import MAX_NUM_SEQS, SCALE, build_case
from tests.support.interpreter import require_interpreter

require_interpreter()

from engine.attention import triton_paged  # noqa: E402
from engine.kernels import decode_triton  # noqa: E402
from engine.kernels.decode_triton import paged_decode  # noqa: E402
from engine.kernels.key_tiles_triton import keys_per_tile  # noqa: E402

# On both sides of a tile's edge: 32 keys at head_dim 128 in float32 (64 in bf16), and of a chunk 16
# tokens with two query heads to a K/V head.
SPANS = {
    "decode": [(1, 1), (31, 1), (32, 1), (33, 1), (129, 1)],
    "prompts": [(0, 5), (0, 1), (0, 32), (0, 70)],
    "chunks": [(3, 6), (31, 33), (32, 16), (33, 15), (63, 2), (64, 8), (70, 40)],
    "short": [(9, 1), (0, 7), (5, 6)],
    "mixed": [(95, 1), (15, 1), (0, 7), (37, 50), (0, 1)],
}


@pytest.fixture(autouse=True)
def few_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes milliseconds for a program that ends at once."""
    monkeypatch.setattr(triton_paged, "_PROGRAMS", 24)


def assert_exact(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


PAGES = [("mixed", 1), ("mixed", 7), ("mixed", 16), ("mixed", 64), ("mixed", 256)]


@pytest.mark.parametrize(
    ("spans", "page_size"), [("decode", 16), ("prompts", 64), ("chunks", 16), *PAGES]
)
def test_like_float64(spans: str, page_size: int) -> None:
    """Three rows of padding, NaN in every place that is not a sequence's own."""
    case = build_case(SPANS[spans], page_size, 4, 2, 128, padding=3)
    assert_exact(case.attend("triton"), case.expected)


@pytest.mark.parametrize(("spans", "page_size"), [("decode", 16), ("mixed", 7), ("mixed", 64)])
@pytest.mark.parametrize("programs", [1, 24])
def test_narrow_tiles_like_float64(
    spans: str, page_size: int, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without splits and with them."""
    monkeypatch.setattr(decode_triton, "NARROW", range(1, 1_000))
    monkeypatch.setattr(triton_paged, "_PROGRAMS", programs)
    case = build_case(SPANS[spans], page_size, 4, 2, 128, padding=3)
    assert_exact(case.attend("triton"), case.expected)


@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(3, 3), (4, 2), (8, 2), (5, 1), (8, 1), (16, 1), (20, 1)]
)
def test_groups_of_query_heads_read_their_kv_head(heads: int, kv_heads: int) -> None:
    case = build_case(SPANS["short"], 4, heads, kv_heads, 16)
    assert_exact(case.attend("triton"), case.expected)


@pytest.mark.parametrize("head_dim", [6, 16, 64, 80, 256])
def test_head_dims(head_dim: int) -> None:
    case = build_case(SPANS["short"], 4, 4, 2, head_dim)
    assert_exact(case.attend("triton"), case.expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spans", ["decode", "mixed"])
def test_half_precision(spans: str, dtype: torch.dtype) -> None:
    case = build_case(SPANS[spans], 64, 8, 2, 128, dtype, padding=2)
    result = case.attend("triton")
    assert result.dtype == dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(result.double(), case.expected, atol=4 * eps, rtol=4 * eps)


@pytest.mark.parametrize("splits", [1, 2, 3, 9])
def test_split_boundaries(splits: int) -> None:
    """Lengths on both sides of a tile and of a split; splits without keys leave no trace."""
    tile = keys_per_tile(128, 4)
    lengths = [1, tile - 1, tile, tile + 1, 2 * tile, splits * tile, splits * tile + 1]
    case = build_case([(n - 1, 1) for n in lengths if n > 1], 16, 4, 2, 128)
    case.attend("sdpa")  # stores this step's K/V
    out = torch.full_like(case.q, torch.nan)
    tables, lens = case.batch.block_tables, case.batch.seq_lens
    paged_decode(case.q, case.k_cache, case.v_cache, tables, lens, out, SCALE, splits)
    assert_exact(out, case.expected)


def test_a_graphs_padding_rows_are_harmless() -> None:
    """As in a captured step: the host knows only the bucket, and rows past the sequences have one
    key, on the dummy page."""
    spans = [(40, 1), (3, 1), (100, 1)]
    case = build_case(spans, 16, 4, 2, 16, padding=MAX_NUM_SEQS - len(spans))
    case.batch.seq_lens[len(spans) :] = 1
    case.batch.block_tables[len(spans) :] = len(case.k_cache) - 1
    meta = torch.tensor([MAX_NUM_SEQS, 1, 40960, MAX_NUM_SEQS], dtype=torch.int32)
    case.batch = replace(case.batch, host_meta=meta)
    assert_exact(case.attend("triton")[: len(spans)], case.expected[: len(spans)])


def test_as_many_chunks_as_there_is_room_for() -> None:
    case = build_case([(i, 40 - 3 * i) for i in range(MAX_NUM_SEQS)], 4, 2, 1, 16)
    assert_exact(case.attend("triton"), case.expected)


def test_number_of_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 programs for each of 132 multiprocessors where the batch alone gives fewer; never 2 or 3
    parts."""
    monkeypatch.undo()
    found = {n: triton_paged.num_splits(n, 8) for n in (1, 2, 8, 9, 16, 32, 64, 256)}
    assert found == {1: 32, 2: 16, 8: 4, 9: 1, 16: 1, 32: 1, 64: 1, 256: 1}
    assert triton_paged.num_splits(1, 1) == triton_paged.num_splits(1, 4) == 64
    case = build_case([(300, 1)], 16, 2, 1, 128)
    assert_exact(case.attend("triton"), case.expected)
