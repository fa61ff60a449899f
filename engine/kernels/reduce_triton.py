"""A sum over ranks, the residual's addition and the norm as one kernel.

Each rank reads its peers' summands where their products wrote them. Apart they are two kernels of
three stages: signals before and after the sum, its way through memory, and the norm.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.launch import kernel, next_power_of_2


@triton.jit
def _part(parts_ptr, rank: tl.constexpr, like: tl.constexpr):
    """The first of a rank's summands: an address of 16 bytes' alignment as a pointer."""
    return tl.multiple_of(tl.load(parts_ptr + rank).to(like), 16)


@triton.jit
def _arrived(flag_ptr):
    """What stands there, and with it all that was written before it was set."""
    return tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")


@kernel()
def _reduce_add_norm(
    parts_ptr,
    flags_ptr,
    epochs_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    size,
    eps,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a row. It tells its peers that it runs, so that all before it on this rank is
    done: this rank's summands stand there, and what it read in the call before it is read. Then it
    waits until theirs have told the same.

    A signal is the number of the row's calls, which only grows: no one has to reset it, and a peer
    that is a call ahead does no harm. (Differences stay right when it passes 2^31.)
    """
    row = tl.program_id(0)
    epoch = tl.load(epochs_ptr + row) + 1
    tl.store(epochs_ptr + row, epoch)
    for peer in tl.static_range(WORLD):
        if peer != RANK:
            theirs = tl.load(flags_ptr + peer).to(epochs_ptr.dtype)
            tl.atomic_xchg(theirs + RANK * MAX_ROWS + row, epoch, sem="release", scope="sys")
    column = tl.arange(0, BLOCK)
    inside = column < size
    at = row.to(tl.int64) * size + column
    residual = tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    mine = tl.load(_part(parts_ptr, RANK, out_ptr.dtype) + at, mask=inside, other=0.0)
    own = tl.load(flags_ptr + RANK).to(epochs_ptr.dtype)
    for peer in tl.static_range(WORLD):
        if peer != RANK:
            flag = own + peer * MAX_ROWS + row
            seen = _arrived(flag)
            while seen - epoch < 0:
                seen = _arrived(flag)
    # Rounded after each addition, in the order of the ranks, as the other paths' sums are.
    total = tl.zeros([BLOCK], dtype=weight.dtype)
    for rank in tl.static_range(WORLD):
        if rank == RANK:
            part = mine
        else:
            part = tl.load(_part(parts_ptr, rank, out_ptr.dtype) + at, mask=inside, other=0.0)
        total = (total.to(tl.float32) + part.to(tl.float32)).to(weight.dtype)
    x = total.to(tl.float32) + residual
    tl.store(total_ptr + at, x, mask=inside)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / size + eps)
    normed = (x * scale).to(weight.dtype).to(tl.float32) * weight.to(tl.float32)
    tl.store(out_ptr + at, normed, mask=inside)


def reduce_add_norm_triton(
    parts: torch.Tensor,
    flags: torch.Tensor,
    epochs: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    rank: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(sum + residual), sum + residual), both [T, H], of summands [T, H] of every rank.

    Every rank calls it with the same T. A rank must not write to the summands of one call before
    its next call is enqueued.

    Args:
        parts: [world] int64 on this GPU, the address of each rank's summands, contiguous and of
            the residual's dtype.
        flags: [world] int64, the address of each rank's signals: [world, R] int32, zeros at first.
        epochs: [R] int32, zeros at first; this rank's own, R >= T.
        residual: [T, H] contiguous; weight: [H].
    """
    rows, size = residual.shape
    assert rows <= len(epochs) and residual.is_contiguous() and weight.dtype == residual.dtype
    out, total = torch.empty_like(residual), torch.empty_like(residual)
    _reduce_add_norm[(rows,)](
        parts,
        flags,
        epochs,
        residual,
        weight,
        out,
        total,
        size,
        eps,
        RANK=rank,
        WORLD=len(flags),
        MAX_ROWS=len(epochs),
        BLOCK=next_power_of_2(size),
        num_warps=4 if size <= 2048 else 8,
    )
    return out, total
