"""The curve of comm=symm_fused: which sums it has, what of them is timed, and what is said."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.comm import Site, fused
from engine.comm.base import AddNorm
from engine.kernels import USUAL, Kernels
from harness.calibration import parts
from harness.calibration.collectives import CollectiveMeter, Readings, rows
from harness.calibration.curves import Curves
from harness.calibration.file import Calibration
from harness.calibration.pairs import PAIRS, REPLAYED_ROUNDS, HostPairs, StampPairs
from harness.calibration.parts import Curve, fused_shapes, marks, obstacle, payload, plan
from harness.calibration.tables import tables
from harness.machine.capabilities import Machine
from harness.machine.models import PUBLISHED
from tests.support.fake_gpu import FakeGpu, FakeRing, GpuCommunicator, HeldGpu

KIB = 1 << 10
GPUS = Machine(gpus=4, cores=2, cxx=None, packages={"triton": "3"})


def test_the_name_is_the_engines() -> None:
    assert parts.FUSED == fused.FUSED


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_a_curve_has_the_payloads_that_the_kernel_takes_and_the_largest(world: int) -> None:
    """At most 8 MiB from peers and 1,024 rows, in bf16."""
    found = fused_shapes(world, "cuda")
    sizes = [2 * rows * hidden for rows, hidden in found]
    assert sizes == sorted(set(sizes))
    assert all(rows <= 1024 and 2 * rows * hidden * (world - 1) <= 8 << 20
               for rows, hidden in found)  # fmt: skip
    for config in PUBLISHED.values():
        hidden = config["hidden_size"]
        of_model = [payload("all_reduce", hidden, 0, batch, "bfloat16") for batch in
                    (1, 8, 32, 128, 256)]  # fmt: skip
        taken = [size for size in of_model if size * (world - 1) <= 8 << 20]
        assert set(taken) <= set(sizes) and taken[-1] == max(s for s in of_model if s in sizes)
        most = min(1024, (8 << 20) // (world - 1) // (2 * hidden))
        assert 2 * hidden * most in sizes


def test_sizes_of_two_ranks_by_hand() -> None:
    found = {2 * rows * hidden: (rows, hidden) for rows, hidden in fused_shapes(2, "cuda")}
    assert min(found) == 2 * KIB and max(found) == 8 << 20
    assert found[2 * KIB] == (1, 1024) and found[8 << 20] == (1024, 4096)
    # 8b x8 and 0.6b x32: the wider rows.
    assert marks("all_reduce", "cuda")[64 * KIB] == "8b x8, 0.6b x32"
    assert found[64 * KIB] == (8, 4096)
    assert found[819 * 2 * 5120] == (819, 5120)  # 820 of its rows are above 8 MiB
    eight = {2 * rows * hidden for rows, hidden in fused_shapes(8, "cuda")}
    assert max(eight) == 234 * 2 * 2560 <= (8 << 20) / 7 < 235 * 2 * 2560


def test_the_plan_has_its_all_reduces_alone() -> None:
    """Its gathers and broadcasts are NCCL's, and sums that no norm follows symm_mem's."""
    own = [name for name in plan(GPUS, [2, 4]) if "/symm_fused/" in name]
    assert own == [f"all_reduce/symm_fused/{n}/{mode}" for n in (2, 4)
                   for mode in ("eager", "graph")]  # fmt: skip
    apart = Machine(gpus=4, cores=2, cxx=None, packages={"triton": "3"},
                    strangers=frozenset({(2, 3)}))  # fmt: skip
    said = "GPU 2 cannot reach the memory of GPU 3"
    assert [obstacle(name, apart) for name in own] == [None, None, said, said]


class Fusing(GpuCommunicator):
    """Products take 900 ns of the GPU, a sum with all that is behind it 3,000; small all-reduces
    5,000. `made` are the products that wait to be summed."""

    def __init__(self, gpu: FakeGpu) -> None:
        super().__init__(gpu)
        self.made: list[torch.Tensor] = []
        self.summed: list[tuple[int, ...]] = []

    def partial_linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        kernels: Kernels = USUAL,
    ) -> torch.Tensor:
        self.gpu.work(900)
        self.made.append(x @ weight.t())
        return self.made[-1]

    def reduce_add_norm(
        self, partial: torch.Tensor, residual: torch.Tensor, norm: AddNorm, site: Site
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.made.pop() is partial and not self.made
        assert partial.shape == residual.shape and norm.weight.shape == residual.shape[1:]
        self.summed.append(tuple(partial.shape))
        self.gpu.work(3000)
        return residual, residual


def test_a_time_is_of_the_sum_and_not_of_the_product_in_front() -> None:
    gpu = FakeGpu()
    comm = Fusing(gpu)
    meter = CollectiveMeter(comm, "cpu", StampPairs(HeldGpu(gpu), FakeRing(gpu, REPLAYED_ROUNDS)))
    shapes = fused_shapes(2, "cpu")
    for mode in ("eager", "graph"):
        comm.summed.clear()
        found = meter(f"all_reduce/symm_fused/2/{mode}")
        assert [(r.rows, r.bytes, r.dtype) for r in found] == [
            (n, n * hidden * 4, "float32") for n, hidden in shapes
        ]
        assert {float(t) for r in found for t in np.unique(r.pairs_ns)} == {3000.0}
        counts = [comm.summed.count(shape) for shape in shapes]
        assert sum(counts) == len(comm.summed) and all(n and n % PAIRS == 0 for n in counts)
    comm.close()


def test_rounds_are_of_an_even_number_of_sums() -> None:
    """The sides take turns: whatever is enqueued behind a round, or replayed, begins with the
    first."""
    assert PAIRS % 2 == 0
    calls: list[int] = []
    HostPairs().measure("eager", lambda: None, lambda: calls.append(1))
    assert len(calls) % 2 == 0


def readings(nbytes: int, rows: int | None) -> Readings:
    return Readings(nbytes, "bfloat16", np.array([[5_000.0, 5_000.0]]), 1_000.0, 10, "stamps", rows)


def test_file_and_table_say_what_a_time_holds(tmp_path: Path) -> None:
    calibration = Calibration(tmp_path / "hardware" / "0123.json")
    for path, of_rows in (("symm_fused", 8), ("symm_mem", None)):
        name = Curve("all_reduce", path, 2, "graph").name
        calibration.put(name, rows(name, [[readings(64 * KIB, of_rows)]] * 2, "cuda"))
    own, plain = calibration.curve_rows()
    assert (own["rows"], own["holds"]) == (8, "sum over ranks, addition to the residual, norm")
    assert own["transfer_us"] == 4.0 and own["algbw_GBps"] is own["busbw_GBps"] is None
    assert own["reason"].startswith("no bandwidth: the time is of sum over ranks, addition")
    assert "rows" not in plain and "holds" not in plain
    titles = [title for title, _, _ in tables(calibration)]
    assert titles == [
        "all_reduce, symm_fused, 2 ranks, bfloat16; source stamps, tick 0.01 us; of sum over "
        "ranks, addition to the residual, norm",
        "all_reduce, symm_mem, 2 ranks, bfloat16; source stamps, tick 0.01 us",
    ]
    curves = Curves(calibration.curve_rows())
    assert curves.time_us("all_reduce", "symm_fused", "graph", 2, 64 * KIB) == 4.0
