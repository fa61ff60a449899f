"""Ranks that share memory measure the curve of comm=symm_fused, its kernel interpreted."""

from __future__ import annotations

import pickle
from typing import Any

import torch

from engine.comm import Kind, StepInfo, fused, symmetric
from engine.comm.fused import FusedCommunicator
from engine.comm.types import Phase
from harness.calibration import pairs
from harness.calibration.collectives import CollectiveMeter, Readings, rows
from tests.support.interpreter import require_interpreter
from tests.support.rank_processes import found_by_ranks
from tests.support.shared_memory import Buffers, share_of, sides_of
from tests.support.threads import Recorder

require_interpreter()

SIDE, ROWS = 3072, 8
"""Bytes of a side, its rows: of tiny (512 bytes a row), 6 rows at most with two ranks."""


def on_rank(
    rank: int, port: int, world: int, buffers: Buffers, memory: list[torch.Tensor], out: Any
) -> None:
    fused.SIDE_BYTES, fused.MAX_ROWS, pairs.HOST_PAIRS = SIDE, ROWS, 16
    symmetric.BUFFER_BYTES = len(buffers.bytes[0])
    shares = {"share": share_of(buffers), "share_sides": sides_of(memory)}
    comm = FusedCommunicator(rank, world, port, 60.0, backend="gloo", **shares)
    heard = Recorder()
    comm.attach([heard])
    found = CollectiveMeter(comm, "cpu")("all_reduce/symm_fused/2/eager")
    comm.step_begin(StepInfo(0, Phase.DECODE, 1, 1, 1, 1, "eager"))  # asserts whose turn it is
    sums = [(c.kind, c.path, c.bytes) for c in heard.collectives]
    comm.barrier()
    comm.close()
    out.send_bytes(pickle.dumps({"readings": found, "sums": sums}))


def test_ranks_measure_the_engines_own_kernel() -> None:
    def shared(context: Any) -> tuple[int, Buffers, list[torch.Tensor]]:
        memory = [torch.zeros(2 * SIDE + 2 * ROWS * 4, dtype=torch.uint8).share_memory_()
                  for _ in range(2)]  # fmt: skip
        return 2, Buffers.of(2, 1 << 16, context.Barrier(2, timeout=60)), memory

    found = found_by_ranks(on_rank, 2, shared)
    for rank in found:
        readings: list[Readings] = rank["readings"]
        assert [(r.rows, r.bytes) for r in readings] == [(1, 512), (4, 2048), (6, 3072)]
        assert all(r.pairs_ns.shape == (1, 16) for r in readings)
        assert rank["sums"] == [
            (Kind.ALL_REDUCE, "symm_fused", size) for size in (512, 2048, 3072) for _ in range(18)
        ]
    joined = rows("all_reduce/symm_fused/2/eager", [r["readings"] for r in found], "cpu")
    assert [row["mark"] for row in joined] == ["tiny x1", "tiny x4", None]
