"""Paged attention as one opaque operator: store this step's K/V, then attend.

An operator for the same reasons as the collectives (engine/comm/ops.py): torch.compile neither
traces into it nor splits the graph at it. All it works on are arguments, and what it mutates is
declared.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from engine.attention import sdpa
from engine.batch import ForwardBatch
from engine.comm import ops as _comm_ops  # defines the namespace that is extended here
from engine.errors import ConfigError
from engine.kernels.store_kv import store_kv

# A backend is called (q, k_cache, v_cache, out, block_tables, seq_lens, cu_seqlens_q, host_meta,
# scale), arguments as in `Attention.forward` and ForwardBatch, and writes every row of out.
BACKENDS: dict[str, Callable[..., None]] = {"sdpa": sdpa.attend}

assert _comm_ops.library.ns == "rangefinder"
library = torch.library.Library("rangefinder", "FRAGMENT")
library.define(
    "paged_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, "
    "Tensor(c!) out, Tensor slot_mapping, Tensor block_tables, Tensor seq_lens, "
    "Tensor cu_seqlens_q, Tensor host_meta, float scale, str backend) -> ()"
)


def _paged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    host_meta: torch.Tensor,
    scale: float,
    backend: str,
) -> None:
    store_kv(k, v, k_cache, v_cache, slot_mapping)
    attend = BACKENDS[backend]
    attend(q, k_cache, v_cache, out, block_tables, seq_lens, cu_seqlens_q, host_meta, scale)


library.impl("paged_attention", _paged_attention, "CompositeExplicitAutograd")
torch.library.register_fake("rangefinder::paged_attention", lambda *args: None, lib=library)


def resolve_backend(name: str) -> str:
    """What `auto` becomes.

    Raises:
        ConfigError: no such backend.
    """
    if name == "auto":
        return "sdpa"
    if name not in BACKENDS:
        raise ConfigError(f"attention={name!r}: choose one of auto, {', '.join(BACKENDS)}")
    return name


class Attention(nn.Module):
    """Causal attention of this rank's heads over its part of the paged cache."""

    def __init__(self, scale: float, backend: str) -> None:
        super().__init__()
        self.scale = scale
        self.backend = resolve_backend(backend)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        """q [T, h, D], k and v [T, kv_heads, D], the layer's caches [pages, page_size, kv_heads, D]
        -> [T, h, D]; k and v are written to the caches first. Rows of padding come out as zeros."""
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        torch.ops.rangefinder.paged_attention(
            q,
            k,
            v,
            k_cache,
            v_cache,
            out,
            batch.slot_mapping,
            batch.block_tables,
            batch.seq_lens,
            batch.cu_seqlens_q,
            batch.host_meta,
            self.scale,
            self.backend,
        )
        return out
