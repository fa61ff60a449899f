"""What the flash backends give flash-attn, by stand-ins that compute it in float64 and check it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from engine.attention import triton_paged
from engine.attention.paged import Paged
from tests.support.attention import MAX_NUM_SEQS, SCALE, build_case, causal_attention

Tensor = torch.Tensor
SPANS = {
    "decode": [(1, 1), (16, 1), (7, 1), (30, 1)],
    "prompts": [(0, 5), (0, 1), (0, 16)],
    "chunks": [(3, 2), (4, 5), (16, 16), (1, 7)],
    "mixed": [(9, 1), (15, 1), (0, 7), (5, 6), (0, 1)],
    "mixed, prompts of one token": [(9, 1), (15, 1), (0, 1), (0, 1)],
}


def keys_of(cache: Tensor, table: Tensor, length: int) -> Tensor:
    """[length, kv_heads, D] of one sequence; table entries past it are not looked at."""
    pages = table[: -(-length // cache.shape[1])]
    return cache[pages.long()].flatten(0, 1)[:length]


def attended(q: Tensor, k: Tensor, v: Tensor, table: Tensor, length: int) -> Tensor:
    return causal_attention(q, keys_of(k, table, length), keys_of(v, table, length)).to(q.dtype)


def check(q: Tensor, tables: Tensor, lengths: Tensor, scale: float, causal: bool) -> None:
    assert scale == SCALE and causal is True
    assert tables.dtype == lengths.dtype == torch.int32
    assert tables.stride(-1) == lengths.stride(0) == 1 and q.stride(-1) == 1
    assert len(tables) == len(lengths)


class Calls(list[str]):
    """Names of the functions called, in order; each checks its arguments as its package does."""

    def decode(
        self, q: Tensor, k: Tensor, v: Tensor, *, cache_seqlens: Tensor, block_table: Tensor,
        softmax_scale: float, causal: bool,
    ) -> Tensor:  # fmt: skip
        """flash_attn.flash_attn_with_kvcache: q [n, 1, h, D]."""
        self.append("decode2")
        check(q, block_table, cache_seqlens, softmax_scale, causal)
        assert q.shape[:2] == (len(cache_seqlens), 1)
        rows = zip(q, block_table, cache_seqlens.tolist(), strict=True)
        return torch.stack([attended(x, k, v, table, n) for x, table, n in rows])

    def varlen2(
        self, q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
        max_seqlen_q: int, max_seqlen_k: int, softmax_scale: float, causal: bool,
        block_table: Tensor,
    ) -> Tensor:  # fmt: skip
        """flash_attn.flash_attn_varlen_func; rows before the first offset stay as they were. Told
        of one row at most, it views q as [sequences, kv_heads, group, D] where heads share K/V."""
        self.append("varlen2")
        lengths = cu_seqlens_k.diff()
        assert max_seqlen_q > 1 or q.shape[1] == k.shape[2] or len(q) == len(lengths)
        check(q, block_table, lengths, softmax_scale, causal)
        return self._varlen(q, k, v, cu_seqlens_q, lengths, block_table, max_seqlen_q, max_seqlen_k)

    def varlen4(
        self, q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor, seqused_k: Tensor,
        max_seqlen_q: int, max_seqlen_k: int, page_table: Tensor, softmax_scale: float,
        causal: bool,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """flash_attn.cute.flash_attn_varlen_func (4.0.0b36)."""
        self.append("varlen4")
        check(q, page_table, seqused_k, softmax_scale, causal)
        assert cu_seqlens_q[0] == 0 and cu_seqlens_q.dtype == torch.int32
        rest = (cu_seqlens_q, seqused_k, page_table, max_seqlen_q, max_seqlen_k)
        return self._varlen(q, k, v, *rest), None

    def _varlen(
        self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, lengths: Tensor, tables: Tensor,
        max_q: int, max_k: int,
    ) -> Tensor:  # fmt: skip
        assert len(starts) == len(lengths) + 1
        assert int(starts.diff().max()) <= max_q and int(lengths.max()) <= max_k
        out = torch.full_like(q, torch.nan)
        for row, length in enumerate(lengths.tolist()):
            own = slice(int(starts[row]), int(starts[row + 1]))
            out[own] = attended(q[own], k, v, tables[row], length)
        return out

    def own_decode(self, q: Tensor, paged: Paged, out: Tensor, scale: float) -> None:
        """triton_paged.decode: the first len(out) sequences."""
        if not len(out):
            return
        self.append("own")
        k, v, tables, lengths = paged[:4]
        assert scale == SCALE and out.is_contiguous() and out.dtype == q.dtype
        for row in range(len(out)):
            out[row] = attended(q[row : row + 1], k, v, tables[row], int(lengths[row]))[0]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    found = Calls()
    package, cute = ModuleType("flash_attn"), ModuleType("flash_attn.cute")
    package.flash_attn_with_kvcache = found.decode  # type: ignore[attr-defined]
    package.flash_attn_varlen_func = found.varlen2  # type: ignore[attr-defined]
    cute.flash_attn_varlen_func = found.varlen4  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", cute)
    monkeypatch.setattr(triton_paged, "decode", found.own_decode)
    yield found


@pytest.mark.parametrize("backend", ["flash2", "flash2_triton", "flash4"])
@pytest.mark.parametrize("spans", SPANS)
@pytest.mark.parametrize(("heads", "kv_heads", "page_size"), [(4, 2, 4), (6, 1, 16)])
def test_like_float64(
    calls: Calls, spans: str, backend: str, heads: int, kv_heads: int, page_size: int
) -> None:
    """NaN in every place that is not a sequence's own; tables hold nonsense past its end."""
    case = build_case(SPANS[spans], page_size, heads, kv_heads, 8)
    found = case.attend(backend)
    assert found.shape == case.q.shape and found.is_contiguous()
    torch.testing.assert_close(found.double(), case.expected, atol=1e-5, rtol=1e-5)
    prompts = ["varlen4" if backend == "flash4" else "varlen2"]
    decode = "decode2" if backend == "flash2" else "own"
    expected = {"decode": [decode], "mixed": [*prompts, decode]}
    assert sorted(calls) == sorted(expected.get(spans.split(",")[0], prompts))


@pytest.mark.parametrize("backend", ["flash2", "flash2_triton", "flash4"])
def test_a_decode_of_a_bucket_takes_its_rows_alone(calls: Calls, backend: str) -> None:
    case = build_case([(9, 1)] * MAX_NUM_SEQS, 4, 4, 2, 8)
    torch.testing.assert_close(case.attend(backend).double(), case.expected, atol=1e-5, rtol=1e-5)
    assert calls == ["decode2" if backend == "flash2" else "own"]


def test_flash4_is_as_near_as_bf16_is(calls: Calls) -> None:
    case = build_case(SPANS["mixed"], 16, 4, 2, 64, torch.bfloat16)
    found = case.attend("flash4")
    assert found.dtype == torch.bfloat16
    eps = torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(found.double(), case.expected, atol=eps, rtol=eps)
