"""Writes the K/V of a step's tokens into the paged cache."""

from __future__ import annotations

import torch

from engine.kernels import runs_triton


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """One Triton kernel on a GPU (store_kv_triton.py); here its PyTorch reference.

    Args:
        k, v: [T, kv_heads, head_dim], any strides.
        k_cache, v_cache: [pages, page_size, kv_heads, head_dim], written in place.
        slot_mapping: [T] int64, page * page_size + offset; several rows may name the dummy page's
            slots, and what stands there afterwards is any one of them.
    """
    if runs_triton(k):
        from engine.kernels.store_kv_triton import store_kv_triton

        store_kv_triton(k, v, k_cache, v_cache, slot_mapping)
        return
    for values, cache in ((k, k_cache), (v, v_cache)):
        cache.view(-1, *cache.shape[2:]).index_copy_(0, slot_mapping, values)
