"""Kernels of a step by hand: what computes, what communicates, and when none runs."""

from __future__ import annotations

import numpy as np
import pytest

from engine.comm.types import Kind
from harness.measuring.profile import kind_of
from harness.observers.kernels import communicates, split

Kernel = tuple[int, int, str]
"""(begin, end, name)"""


def fields(*kernels: Kernel) -> tuple[int, ...]:
    """(kernels, extent, compute, communication, idle, beside)"""
    begin, end = (np.array([k[place] for k in kernels], np.int64) for place in (0, 1))
    found = split(begin, end, np.array([communicates(k[2]) for k in kernels], bool))
    return tuple(found.tolist())


def test_kernels_one_after_the_other_sum_up_to_the_extent() -> None:
    """Gaps of 1 to 4: those before and after the all-reduce are beside it."""
    found = fields((10, 20, "gemm"), (21, 31, "norm"), (33, 40, "ncclDevKernel_AllReduce"),
                   (43, 53, "gemm"), (57, 60, "silu"))  # fmt: skip
    assert found == (5, 50, 33, 7, 1 + 2 + 3 + 4, 2 + 3)
    assert found[1] == found[2] + found[3] + found[4]


def test_overlap_counts_twice_in_the_sums_and_never_as_idle() -> None:
    """A copy inside a kernel, and one that runs on past the next kernel's begin."""
    found = fields((0, 10, "gemm"), (2, 5, "Memcpy HtoD"), (8, 14, "norm"), (16, 20, "gemm"))
    assert found == (4, 20, 10 + 3 + 6 + 4, 0, 2, 0)


def test_a_gap_belongs_to_what_ended_last_before_it() -> None:
    """The all-reduce began first and ended last: the gap behind it is beside it, though the kernel
    that began last before the gap computes."""
    comm = (0, 30, "one_shot_all_reduce_kernel")
    assert fields(comm, (5, 9, "gemm"), (34, 40, "gemm")) == (3, 40, 10, 30, 4, 4)
    assert fields((5, 35, "gemm"), comm, (38, 40, "norm")) == (3, 40, 32, 30, 3, 0)


def test_the_order_of_the_kernels_does_not_matter() -> None:
    rng = np.random.default_rng(0)
    begin = rng.choice(1000, 40, replace=False)
    end = begin + rng.integers(1, 60, 40)
    comm = rng.random(40) < 0.3
    shuffled = rng.permutation(40)
    one = split(begin, end, comm)
    assert split(begin[shuffled], end[shuffled], comm[shuffled]) == one
    busy = np.zeros(1100, bool)
    for a, b in zip(begin, end, strict=True):
        busy[a:b] = True
    inside = busy[begin.min() : end.max()]
    assert one["idle_ns"] == (~inside).sum() and one["extent_ns"] == len(inside)
    assert one["compute_ns"] + one["communication_ns"] == (end - begin).sum()


NAMES = {
    "ncclKernel_AllReduce_RING_LL_Sum_half(ncclDevComm*, unsigned long)": Kind.ALL_REDUCE,
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": Kind.ALL_REDUCE,
    "ncclDevKernel_AllReduce_Sum_f32_NVLS(ncclDevKernelArgsStorage<4096ul>)": Kind.ALL_REDUCE,
    "one_shot_all_reduce_kernel<c10::BFloat16, 16, 2>": Kind.ALL_REDUCE,
    "two_shot_all_reduce_kernel_inplace<c10::BFloat16, 16, 2>": Kind.ALL_REDUCE,
    "multimem_all_reduce_kernel<c10::BFloat16, 16>": Kind.ALL_REDUCE,
    "multimem_one_shot_all_reduce_kernel<c10::BFloat16, 16>": Kind.ALL_REDUCE,
    "_reduce_add_norm": Kind.ALL_REDUCE,
    "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)": Kind.GATHER,
    "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t": Kind.GATHER,
    "ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)": Kind.BROADCAST,
    "ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)": None,  # RCCL has this one alone
    "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)": None,
}
"""Communication kernels of NCCL before and since 2.19, of RCCL, of torch's symmetric memory and of
comm=symm_fused, and the collective that a name tells; None: it does not."""
OTHERS = ("nvjet_tst_128x64_64x6_1x2_h_bz_TNT", "sm90_xmma_gemm_bf16bf16_bf16f32", "_store_kv",
          "void at::native::reduce_kernel<512, 1>", "triton_red_fused__to_copy_add_mean_0",
          "triton_per_fused__to_copy_add_all_reduce_mean_mul_pow_rsqrt_3",
          "Memcpy DtoD", "_nothing")  # fmt: skip


def test_kernels_of_each_library_are_communication_and_no_other_is() -> None:
    assert {name for name in (*NAMES, *OTHERS) if communicates(name)} == set(NAMES)
    assert {name: kind_of(name) for name in NAMES} == {
        name: -1 if kind is None else kind for name, kind in NAMES.items()
    }


@pytest.mark.parametrize(
    ("name", "expected"),
    [("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(x)", True), ("ncclKernel_SendRecv", True),
     ("two_shot_all_reduce_kernel_inplace", True), ("sm90_gemm", False), ("_nothing", False)],
)  # fmt: skip
def test_communication_is_known_by_name(name: str, expected: bool) -> None:
    assert communicates(name) is expected


def test_a_step_without_kernels_is_zero() -> None:
    assert fields() == (0,) * 6
