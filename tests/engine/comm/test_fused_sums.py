"""Sum, residual and norm as one kernel: ranks that share memory, in the interpreter."""

from __future__ import annotations

import pickle
import random
import time
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from engine.comm import Kind, Site, fused, symmetric
from engine.comm.fused import FUSED, FusedCommunicator
from engine.comm.symmetric import ONE_SHOT
from engine.comm.types import Phase, StepInfo
from engine.layers import RMSNorm
from tests.support.interpreter import require_interpreter
from tests.support.rank_processes import found_by_ranks
from tests.support.shared_memory import Buffers, share_of, sides_of
from tests.support.threads import Recorder

require_interpreter()

BF16, F32 = torch.bfloat16, torch.float32
SIDE, ROWS, SIZE, INNER = 4096, 8, 48, 16
"""Bytes of a side, its rows; the norm's size, a rank's part of the product's inner dimension."""
STEPS = [(BF16, 3), (BF16, 1), (F32, 5), (F32, 8), (BF16, 8), (BF16, 9), (F32, 2)] * 4
"""Of two layers each: dtype, rows. Nine are too many for the one kernel."""


def values(*key: int, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hash(key))
    return torch.randn(rows, columns, generator=generator).to(dtype)


def inputs(rank: int, step: int, place: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, INNER] and weight [SIZE, INNER] of one product."""
    dtype, rows = STEPS[step]
    x = values(rank, step, place, 0, rows=rows, columns=INNER, dtype=dtype)
    return x, values(rank, step, place, 1, rows=SIZE, columns=INNER, dtype=dtype)


def norm_of(place: int, dtype: torch.dtype) -> RMSNorm:
    norm = RMSNorm(SIZE, 1e-6, dtype=dtype, device="cpu")
    norm.weight.copy_(values(place, rows=1, columns=SIZE, dtype=dtype)[0])
    return norm


@torch.inference_mode()
def on_rank(
    rank: int, port: int, world: int, buffers: Buffers, memory: list[torch.Tensor], out: Any
) -> None:
    fused.SIDE_BYTES, fused.MAX_ROWS = SIDE, ROWS
    shares = {"share": share_of(buffers), "share_sides": sides_of(memory)}
    symmetric.BUFFER_BYTES = len(buffers.bytes[0])
    comm = FusedCommunicator(rank, world, port, 60.0, backend="gloo", **shares)
    heard, found, late = Recorder(), SimpleNamespace(layers=[]), random.Random(rank)
    comm.attach([heard])
    for step, (dtype, rows) in enumerate(STEPS):
        comm.step_begin(StepInfo(step, Phase.DECODE, rows, rows, rows, rows, "eager"))
        residual = values(step, rows=rows, columns=SIZE, dtype=dtype)
        for place in range(4):
            x, weight = inputs(rank, step, place)
            time.sleep(late.choice((0.0, 0.0, 0.004)))
            part = comm.partial_linear(x, weight, None)
            site = (Site.ATTN_O_PROJ, Site.MLP_DOWN_PROJ)[place % 2]
            normed, residual = comm.reduce_add_norm(part, residual, norm_of(place, dtype), site)
            found.layers.append((normed.clone(), residual.clone()))
    found.paths = [(c.kind, c.site, c.path, c.bytes) for c in heard.collectives]
    x, weight = inputs(rank, 0, 0)
    found.plain = comm.linear_all_reduce(x, weight, None, Site.ATTN_O_PROJ)
    found.last = heard.collectives[-1].path
    comm.barrier()
    comm.close()
    out.send_bytes(pickle.dumps(vars(found)))


def shared(context: Any, world: int) -> tuple[int, Buffers, list[torch.Tensor]]:
    nbytes = 2 * SIDE + world * ROWS * 4
    memory = [torch.zeros(nbytes, dtype=torch.uint8).share_memory_() for _ in range(world)]
    return world, Buffers.of(world, 1 << 16, context.Barrier(world, timeout=60)), memory


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What each rank found."""
    world: int = request.param
    return found_by_ranks(on_rank, world, lambda context: shared(context, world))


def test_every_sum_is_the_reference_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    """Rounded after each addition in the order of the ranks, then as RMSNorm does."""
    for step, (dtype, rows) in enumerate(STEPS):
        residual = values(step, rows=rows, columns=SIZE, dtype=dtype)
        for place in range(4):
            parts = [F.linear(*inputs(rank, step, place)) for rank in range(len(ranks))]
            total = parts[0]
            for part in parts[1:]:
                total = (total.float() + part.float()).to(dtype)
            normed, residual = norm_of(place, dtype)(total, residual)
            for found in ranks:
                own = found["layers"][4 * step + place]
                torch.testing.assert_close(own[0], normed)
                assert torch.equal(own[1], residual), (step, place)


def test_each_sum_is_heard_once_with_its_path(ranks: list[dict[str, Any]]) -> None:
    sites = (Site.ATTN_O_PROJ, Site.MLP_DOWN_PROJ) * 2
    world = len(ranks)
    expected = [
        (Kind.ALL_REDUCE, site, FUSED if rows <= ROWS and fits(rows, dtype, world) else ONE_SHOT,
         rows * SIZE * dtype.itemsize)
        for (dtype, rows), site in product(STEPS, sites)
    ]  # fmt: skip
    assert {path for _, _, path, _ in expected} == {FUSED, ONE_SHOT}
    for found in ranks:
        assert found["paths"] == expected


def fits(rows: int, dtype: torch.dtype, world: int) -> bool:
    """What a rank reads from its peers at most."""
    return rows * SIZE * dtype.itemsize * (world - 1) <= SIDE


def test_a_sum_without_a_norm_is_symmetric_memorys(ranks: list[dict[str, Any]]) -> None:
    total = sum(F.linear(*(t.double() for t in inputs(rank, 0, 0))) for rank in range(len(ranks)))
    for found in ranks:
        assert found["last"] == ONE_SHOT
        torch.testing.assert_close(found["plain"].double(), total, rtol=0.02, atol=0.05)
