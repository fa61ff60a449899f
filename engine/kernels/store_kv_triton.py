"""store_kv as one Triton kernel; the reference is engine/kernels/store_kv.py."""

from __future__ import annotations

import torch
import triton.language as tl

from engine.kernels.launch import kernel, next_power_of_2


@kernel()
def _store(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slot_ptr,
    k_stride,
    v_stride,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a token: its row of kv_heads * head_dim values, K and V."""
    # 64 bits: slot * ROW passes 2^31 elements in a cache of 4 GiB of bf16.
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token)
    column = tl.arange(0, BLOCK)
    inside = column < ROW
    k = tl.load(k_ptr + token * k_stride + column, mask=inside)
    v = tl.load(v_ptr + token * v_stride + column, mask=inside)
    tl.store(k_cache_ptr + slot * ROW + column, k, mask=inside)
    tl.store(v_cache_ptr + slot * ROW + column, v, mask=inside)


def store_kv_triton(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Arguments as of store_kv; a row of k or v is contiguous, rows are any distance apart."""
    tokens, kv_heads, head_dim = k.shape
    row = kv_heads * head_dim
    for tensor in (k, v):
        assert tensor.stride()[1:] == (head_dim, 1), tensor.stride()
    assert k_cache.is_contiguous() and v_cache.is_contiguous()
    _store[(tokens,)](
        k,
        v,
        k_cache,
        v_cache,
        slot_mapping,
        k.stride(0),
        v.stride(0),
        ROW=row,
        BLOCK=next_power_of_2(row),
    )
