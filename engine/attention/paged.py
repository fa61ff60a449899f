"""Paged: what a backend attends to."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Paged(NamedTuple):
    """One layer's caches and whose keys stand where; K/V of this step's tokens are in them.

    A backend is `attend(q [T, h, D], paged, scale)` -> a new [T, h, D]; what it puts into rows of
    padding is finite and otherwise of no account.

    Attributes:
        k_cache, v_cache: [pages, page_size, kv_heads, D].
        block_tables, seq_lens, cu_seqlens_q, cu_seqlens_k, host_meta: as in ForwardBatch.
    """

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    host_meta: torch.Tensor

    def counts(self) -> tuple[int, int, int, int]:
        """S, max query length, max seq_len, sequences that decode; no wait for a GPU."""
        num_seqs, max_query, max_len, num_decodes = self.host_meta.tolist()
        return num_seqs, max_query, max_len, num_decodes
