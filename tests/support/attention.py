"""Hand-made steps of paged attention: what must not be read is NaN, results are in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from engine.attention import Attention
from engine.inputs.batch import ForwardBatch
from tests.support.batches import Rows, build_batch

SCALE = 0.37
MAX_NUM_SEQS = 8


@dataclass
class Case:
    """Sequences whose K/V up to `start` stands in the cache and whose rows from there are new."""

    batch: ForwardBatch
    q: torch.Tensor  # [T, h, D]
    k: torch.Tensor  # [T, kv_heads, D]
    v: torch.Tensor
    k_cache: torch.Tensor  # [pages + 1, page_size, kv_heads, D]
    v_cache: torch.Tensor
    expected: torch.Tensor  # [T, h, D] float64

    def to(self, device: str) -> Case:
        """The same step there; what the host knows stays on the host."""
        batch = {f.name: getattr(self.batch, f.name) for f in fields(self.batch)}
        moved = {n: t if n == "host_meta" else t.to(device) for n, t in batch.items()}
        tensors = [getattr(self, f.name).to(device) for f in fields(self)[1:]]
        return Case(ForwardBatch(**moved), *tensors)

    def attend(self, backend: str) -> torch.Tensor:
        """Stores this step's K/V and attends."""
        attention = Attention(SCALE, backend)
        return attention(self.q, self.k, self.v, self.k_cache, self.v_cache, self.batch)


def build_case(
    spans: Sequence[tuple[int, int]],
    page_size: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
    padding: int = 0,
) -> Case:
    """spans: (start, number of new rows) of each sequence, decoding ones first. Pages are scattered
    at random; the values of a sequence depend on its place in the list alone."""
    lengths = [start + new for start, new in spans]
    counts = [-(-n // page_size) for n in lengths]
    free = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).tolist()
    dummy = len(free)
    cache_size = (2, dummy + 1, page_size, kv_heads, head_dim)
    caches = k_cache, v_cache = torch.full(cache_size, math.nan, dtype=dtype).unbind()
    rows, new_rows, expected = [], [], []
    for seed, ((start, new), length, count) in enumerate(zip(spans, lengths, counts, strict=True)):
        generator = torch.Generator().manual_seed(seed)
        q, k, v = (
            torch.randn(length, n, head_dim, generator=generator).to(dtype)
            for n in (heads, kv_heads, kv_heads)
        )
        pages = [free.pop() for _ in range(count)]
        position = torch.arange(start)
        slots = torch.tensor(pages)[position // page_size] * page_size + position % page_size
        for cache, values in zip(caches, (k, v), strict=True):
            cache.view(-1, kv_heads, head_dim)[slots] = values[:start]
        rows.append(Rows([0] * new, start, pages))
        new_rows.append((q[start:], k[start:], v[start:]))
        expected.append(causal_attention(q[start:], k, v))
    new_rows.append(
        tuple(
            torch.full((padding, n, head_dim), math.nan, dtype=dtype)
            for n in (heads, kv_heads, kv_heads)
        )
    )
    expected.append(torch.zeros(padding, heads, head_dim, dtype=torch.float64))
    q, k, v = (
        torch.cat([part.to(dtype) for part in parts]) for parts in zip(*new_rows, strict=True)
    )
    batch = build_batch(
        rows,
        page_size,
        max_num_seqs=max(MAX_NUM_SEQS, len(spans)),
        max_pages=max(64, *counts),
        padded_to=len(q),
        dummy_slot=dummy * page_size,
    )
    return Case(batch, q, k, v, k_cache, v_cache, torch.cat(expected))


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The last rows q [n, h, D] of a sequence, k and v [L, kv_heads, D] -> [n, h, D] in float64."""
    rows, heads, _ = q.shape
    length, kv_heads, _ = k.shape
    keys, values = (t.double().repeat_interleave(heads // kv_heads, dim=1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * SCALE
    position = torch.arange(length, device=q.device)
    later = position > position[length - rows :, None]
    weights = scores.masked_fill(later, -math.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, values)
