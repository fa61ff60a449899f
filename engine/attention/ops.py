"""Paged attention as one opaque operator: store this step's K/V, then attend.

An operator for the same reasons as the collectives (engine/comm/ops.py): torch.compile neither
traces into it nor splits the graph at it. All it works on are arguments, and what it mutates is
declared.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from engine.attention import flash, flash4, flash_triton, sdpa, triton_paged
from engine.attention.paged import Paged
from engine.comm import ops as _comm_ops  # defines the namespace that is extended here
from engine.inputs.batch import ForwardBatch
from engine.kernels.store_kv import store_kv

BACKENDS: dict[str, Callable[[torch.Tensor, Paged, float], torch.Tensor]] = {
    "sdpa": sdpa.attend,
    "flash2": flash.attend,
    "flash2_triton": flash_triton.attend,
    "flash4": flash4.attend,
    "triton": triton_paged.attend,
}

assert _comm_ops.library.ns == "rangefinder"
library = torch.library.Library("rangefinder", "FRAGMENT")
library.define(
    "paged_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, "
    "Tensor slot_mapping, Tensor block_tables, Tensor seq_lens, Tensor cu_seqlens_q, "
    "Tensor cu_seqlens_k, Tensor host_meta, float scale, str backend) -> Tensor"
)


def _paged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    host_meta: torch.Tensor,
    scale: float,
    backend: str,
) -> torch.Tensor:
    store_kv(k, v, k_cache, v_cache, slot_mapping)
    lengths = (seq_lens, cu_seqlens_q, cu_seqlens_k, host_meta)
    return BACKENDS[backend](q, Paged(k_cache, v_cache, block_tables, *lengths), scale)


library.impl("paged_attention", _paged_attention, "CompositeExplicitAutograd")
torch.library.register_fake(
    "rangefinder::paged_attention",
    lambda q, *args: torch.empty_like(q, memory_format=torch.contiguous_format),
    lib=library,
)


class Attention(nn.Module):
    """Causal attention of this rank's heads over its part of the paged cache; `backend` is a name
    in BACKENDS."""

    def __init__(self, scale: float, backend: str) -> None:
        super().__init__()
        self.scale = scale
        self.backend = backend

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
        -> [T, h, D]; k and v are written to the caches first."""
        compiling = torch.compiler.is_compiling()
        run = torch.ops.rangefinder.paged_attention if compiling else _paged_attention
        return run(
            q,
            k,
            v,
            k_cache,
            v_cache,
            batch.slot_mapping,
            batch.block_tables,
            batch.seq_lens,
            batch.cu_seqlens_q,
            batch.cu_seqlens_k,
            batch.host_meta,
            self.scale,
            self.backend,
        )

    def over_cache(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        """The same with this step's k and v in the caches already; not for code that is traced."""
        lengths = (batch.seq_lens, batch.cu_seqlens_q, batch.cu_seqlens_k, batch.host_meta)
        paged = Paged(k_cache, v_cache, batch.block_tables, *lengths)
        return BACKENDS[self.backend](q, paged, self.scale)
