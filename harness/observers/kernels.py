"""Kernels of a step: which of them communicate, what they take, and when none runs."""

from __future__ import annotations

import numpy as np

from harness.observers.records import SPLIT_DTYPE

COMMUNICATION = ("ncclDevKernel", "ncclKernel", "all_reduce", "_reduce_add_norm")
"""Parts of the names of communication kernels: of NCCL since 2.19 and before, of torch's symmetric
memory (one_shot_all_reduce_kernel, two_shot_...), of comm=symm_fused."""
_COMPILED = "triton_"
"""How names of torch.compile's kernels begin. The operators that they came from follow, and so does
one whose result they read: triton_per_fused_add_all_reduce_mean_0."""


def communicates(name: str) -> bool:
    return not name.startswith(_COMPILED) and any(part in name for part in COMMUNICATION)


def split(begin_ns: np.ndarray, end_ns: np.ndarray, communication: np.ndarray) -> np.ndarray:
    """One SPLIT_DTYPE of one step's K kernels (copies by the device among them), in any order.

    Sums count kernels that overlap each for itself; idle time is the extent less the union of all
    intervals, so that the two and the extent agree only where nothing overlaps.

    Args:
        begin_ns, end_ns: [K]; communication: [K] bool.
    """
    found = np.zeros((), SPLIT_DTYPE)
    if not len(begin_ns):
        return found
    order = np.argsort(begin_ns, kind="stable")
    begin, end, comm = begin_ns[order], end_ns[order], communication[order]
    times = end - begin
    latest = np.maximum.accumulate(end)
    gaps = np.maximum(begin[1:] - latest[:-1], 0)
    # The kernel that a gap follows is the one that ended last, not the one that began last.
    ended = np.maximum.accumulate(np.where(end == latest, np.arange(len(end)), 0))
    beside = comm[1:] | comm[ended[:-1]]
    found["kernels"] = len(begin)
    found["extent_ns"] = latest[-1] - begin[0]
    found["compute_ns"] = times[~comm].sum()
    found["communication_ns"] = times[comm].sum()
    found["idle_ns"] = gaps.sum()
    found["beside_ns"] = gaps[beside].sum()
    return found
