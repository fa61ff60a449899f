"""TP=2 over symmetric memory: sums as NCCL's, in replays too, and the engine's greedy tokens."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams
from engine.comm import Site
from engine.comm.symmetric import BUFFER_BYTES, ONE_SHOT, TWO_SHOT, path_of
from engine.comm.types import ObserverContext
from engine.kernels import Kernels
from engine.kernels.linear import linear
from engine.layers import RMSNorm
from tests.gpu.conftest import HEADS
from tests.support.checkpoints import Checkpoints
from tests.support.greedy import greedy_reference
from tests.support.path_observer import Paths
from tests.support.rank_processes import run_processes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

REPLAYS = 1_000
NBYTES = [16, 2 << 10, 2032, 64 << 10, (64 << 10) + 16, 512 << 10, 8 << 20, BUFFER_BYTES]


def summand(rank: int, turn: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(1_000 * turn + rank)
    numel = nbytes // dtype.itemsize
    return torch.randn(numel, device="cuda", generator=generator).to(dtype)


@torch.inference_mode()
def _sums(rank: int, port: int) -> None:
    """Of two ranks there is one addition, whose rounding is the same by whatever path."""
    import torch.distributed as dist

    from engine.comm.symmetric import SymmetricCommunicator

    torch.cuda.set_device(rank)
    comm = SymmetricCommunicator(rank, 2, port)
    for dtype in (torch.bfloat16, torch.float32):
        for turn, nbytes in enumerate(NBYTES):
            x = summand(rank, turn, nbytes, dtype)
            expected = x.clone()
            dist.all_reduce(expected)
            own = comm.all_reduce(x, Site.EMBED)
            assert own is x and torch.equal(own, expected), (nbytes, dtype)
    _replays(comm)
    comm.barrier()
    comm.close()


def _replays(comm: Any) -> None:
    """A graph of products whose results are summed from the buffer, of copies, and of the two paths
    in turn, so that each reuses what the one before may still read; ranks drift apart by a spin."""
    torch.manual_seed(comm.rank)
    weight = torch.randn(256, 128, device="cuda", dtype=torch.bfloat16)
    small = torch.zeros(8, 128, device="cuda", dtype=torch.bfloat16)
    large = torch.zeros(512, 128, device="cuda", dtype=torch.bfloat16)
    assert path_of(8 * 256 * 2, torch.bfloat16, 2) == ONE_SHOT
    assert path_of(512 * 256 * 2, torch.bfloat16, 2) == TWO_SHOT
    spin = torch.zeros(1, device="cuda")

    def step() -> list[torch.Tensor]:
        found = []
        for _ in range(3):
            for x in (small, large):
                found.append(comm.linear_all_reduce(x, weight, None, Site.MLP_DOWN_PROJ))
                spin.add_(1)
                found.append(comm.all_reduce(x.clone(), Site.EMBED))
        return found

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    stream.synchronize()
    comm.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        outs = step()
        graph.capture_end()
    stream.synchronize()
    wrong = torch.zeros((), device="cuda", dtype=torch.int64)
    for turn in range(REPLAYS):
        for x in (small, large):
            x.copy_(summand(comm.rank, turn, x.nbytes, x.dtype).view_as(x))
        expected = []
        for x in (small, large):
            for part in (torch.mm(x, weight.t()), x.clone()):
                torch.distributed.all_reduce(part)
                expected.append(part)
        if turn % 2 == comm.rank:
            torch.cuda._sleep(200_000)
        graph.replay()
        for out, reference in zip(outs, expected * 3, strict=True):
            wrong += (out != reference).sum()
    assert int(wrong) == 0
    del graph


def test_sums_are_nccls_bit_for_bit_also_in_a_thousand_replays() -> None:
    run_processes(_sums)


ROWS = [1, 3, 8, 33, 128, 1024, 1025]
"""The last are too many for the one kernel."""


@torch.inference_mode()
def _fused(rank: int, port: int) -> None:
    """Layers of two sums, eagerly and in graphs of several sizes replayed in turn, against the same
    sums by NCCL and the norm's own kernel: within roundings, which four layers carry on."""
    from engine.comm.fused import FUSED, FusedCommunicator

    torch.cuda.set_device(rank)
    comm = FusedCommunicator(rank, 2, port)
    torch.manual_seed(7)
    norm = RMSNorm(1024, 1e-6, dtype=torch.bfloat16, device="cuda", kernels=Kernels("store"))
    norm.weight.normal_()
    torch.manual_seed(rank)
    weight = torch.randn(1024, 128, device="cuda", dtype=torch.bfloat16) / 8
    xs = {rows: torch.zeros(rows, 128, device="cuda", dtype=torch.bfloat16) for rows in ROWS}
    begun = {r: torch.ones(r, 1024, device="cuda", dtype=torch.bfloat16) for r in ROWS}

    def layers(rows: int) -> list[torch.Tensor]:
        x, residual, found = xs[rows], begun[rows], []
        for site in (Site.ATTN_O_PROJ, Site.MLP_DOWN_PROJ) * 2:
            part = comm.partial_linear(x, weight, None, Kernels("store", "triton"))
            normed, residual = comm.reduce_add_norm(part, residual, norm, site)
            x = normed[:, :128].contiguous()
            found += [normed, residual]
        return found

    def reference(rows: int) -> list[torch.Tensor]:
        x, residual, found = xs[rows], begun[rows], []
        for _ in range(4):
            part = linear(x, weight, None, Kernels("store", "triton"))
            torch.distributed.all_reduce(part)
            normed, residual = norm(part, residual)
            x = normed[:, :128].contiguous()
            found += [normed, residual]
        return found

    heard = Paths(ObserverContext(rank, 2, "cuda", lambda: None, lambda *of: lambda: None))
    comm.attach([heard])
    graphs, stream = {}, torch.cuda.Stream()
    for rows in ROWS:
        with torch.cuda.stream(stream):
            layers(rows)
        stream.synchronize()
        comm.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            outs = layers(rows)
            graph.capture_end()
        graphs[rows] = graph, outs
        stream.synchronize()
    assert {path for _, path in heard.result()} == {FUSED, TWO_SHOT}
    comm.attach([])
    wrong = torch.zeros((), device="cuda", dtype=torch.int64)
    for turn in range(REPLAYS):
        rows = ROWS[turn % len(ROWS)]
        xs[rows].copy_(summand(rank, turn, xs[rows].nbytes, torch.bfloat16).view_as(xs[rows]))
        expected = reference(rows)
        if turn % 3 == rank:
            torch.cuda._sleep(200_000)
        if turn % 5:
            graph, outs = graphs[rows]
            graph.replay()
        else:
            outs = layers(rows)
        for out, right in zip(outs, expected, strict=True):
            wrong += (~torch.isclose(out.float(), right.float(), rtol=2**-6, atol=0.05)).sum()
    assert int(wrong) == 0
    comm.barrier()
    graphs.clear()
    comm.close()


def test_a_sum_with_its_norm_is_both_apart_also_in_a_thousand_steps() -> None:
    run_processes(_fused, within_s=60.0)


TORCHS = {"linear": "torch"}
MODES: list[dict[str, Any]] = [
    {"compile": scope, "enforce_eager": eager}
    for scope in ("off", "layer", "model")
    for eager in (True, False)
] + [{"enforce_eager": False, **TORCHS}, {"enforce_eager": False, "compile": "model", **TORCHS}]


@pytest.mark.parametrize("comm", ["symm_mem", "symm_fused"])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_greedy_tokens_are_transformers(
    checkpoints: Checkpoints, mode: dict[str, Any], comm: str, compile_cache: Path
) -> None:
    """In float32. Every all-reduce but none other is heard to go through symmetric memory."""
    path = checkpoints(**HEADS)
    rng = random.Random(3)
    prompts = [[rng.randrange(97) for _ in range(rng.randrange(1, 30))] for _ in range(12)]
    params = SamplingParams(temperature=0, max_tokens=25, ignore_eos=True)
    options: dict[str, Any] = {
        "page_size": 8,
        "attention": "sdpa",
        "max_model_len": 64,
        "max_num_seqs": 4,
        "num_pages": 32,  # four sequences of 64 positions
        "max_num_batched_tokens": 16,
        "cache_dir": str(compile_cache),
        **mode,
    }
    with LLM(path, tp=2, comm=comm, **options) as llm:
        assert llm.effective["comm"] == comm
        for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
            assert tuple(output.token_ids) == greedy_reference(path, tuple(prompt), 25)
        llm.attach([Paths])
        llm.generate(prompts[:2], params)
        heard = {pair for rank in llm.detach() for pair in rank[0]}
    kinds = {(kind, "symm" in path) for kind, path in heard}
    assert kinds == {("all_reduce", True), ("gather", False), ("broadcast", False)}
