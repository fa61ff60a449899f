"""All-reduces through symmetric memory: which path, what is summed, what observers hear."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from engine.comm import Kind, Site, symmetric, symmetric_memory
from engine.comm.ranks import connect_rank
from engine.comm.symmetric import ONE_SHOT, TWO_SHOT, SymmetricCommunicator, path_of
from engine.comm.symmetric_memory import SymmetricMemory
from engine.errors import ConfigError
from engine.layers import RMSNorm
from engine.parallel import RowParallelLinear
from tests.support.rank_processes import found_by_ranks
from tests.support.shared_memory import Buffers, FakeShared, share_of
from tests.support.threads import Recorder

KIB, MIB = 1 << 10, 1 << 20
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(
    ("nbytes", "dtype", "world", "expected"),
    [
        (16, BF16, 2, ONE_SHOT),
        (64 * KIB, BF16, 2, ONE_SHOT),
        (64 * KIB + 16, BF16, 2, TWO_SHOT),
        (64 * MIB, F32, 2, TWO_SHOT),
        (64 * MIB + 16, BF16, 2, None),
        (64 * KIB, BF16, 4, TWO_SHOT),
        (21 * KIB, BF16, 4, ONE_SHOT),
        (9 * KIB, BF16, 8, ONE_SHOT),
        (10 * KIB, BF16, 8, TWO_SHOT),
        (32 * KIB, BF16, 3, ONE_SHOT),
        (33 * KIB, BF16, 3, None),
        (24, F32, 2, None),
        (4, F32, 2, None),
        (0, F32, 2, None),
        (64, F16, 2, None),
        (64, torch.int64, 2, None),
    ],
)
def test_the_path_follows_bytes_dtype_and_ranks(
    nbytes: int, dtype: torch.dtype, world: int, expected: str | None
) -> None:
    assert path_of(nbytes, dtype, world) == expected


# -- two ranks in processes, the memory made up ---------------------------------------------------

SIZES = [(8, BF16), (1, F32), (3, BF16), (2**15, BF16), (2**15 + 8, BF16), (2**18, F32),
         (2**18 + 4, F32), (2**15, F16), (40, torch.int64)]  # fmt: skip
PATHS = [ONE_SHOT, "gloo", "gloo", ONE_SHOT, TWO_SHOT, TWO_SHOT, "gloo", "gloo", "gloo"]
"""By SIZES, with a buffer of 1 MiB. The largest float32 fills it."""


def summand(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(size, generator=generator) * 8).to(dtype)


def layer_of(comm: SymmetricCommunicator, bias: bool) -> RowParallelLinear:
    layer = RowParallelLinear(64, 48, comm, Site.ATTN_O_PROJ, bias=bias, dtype=F32, device="cpu")
    weight, column = (
        summand(7, 48 * 64, F32).view(48, 64),
        slice(32 * comm.rank, 32 + 32 * comm.rank),
    )
    layer.weight.copy_(weight[:, column])
    if layer.bias is not None:
        layer.bias.copy_(summand(8, 48, F32))
    return layer


def reduce_add_norm(comm: SymmetricCommunicator, bias: bool) -> Callable[..., Any]:
    layer, norm = layer_of(comm, bias), RMSNorm(48, 1e-6, dtype=F32, device="cpu")
    norm.weight.fill_(1.5)

    def run(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = layer(x)
        return comm.reduce_add_norm(layer.partial(x) + 0 * first, residual, norm, layer.site)

    def staged(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return comm.reduce_add_norm(layer.partial(x), residual, norm, layer.site)

    compiled = torch.compile(staged, fullgraph=True, backend="aot_eager")
    return lambda x, residual: (run(x, residual), staged(x, residual), compiled(x, residual))


@torch.inference_mode()
def on_rank(rank: int, port: int, buffers: Buffers, out: Any) -> None:
    symmetric.BUFFER_BYTES = MIB
    comm = SymmetricCommunicator(rank, 2, port, 60.0, backend="gloo", share=share_of(buffers))
    heard, found = Recorder(), SimpleNamespace(sums=[], layers={}, calls={})
    shared = comm._shared
    assert isinstance(shared, FakeShared)
    comm.attach([heard])
    for size, dtype in SIZES:
        found.sums.append(comm.all_reduce(summand(rank, size, dtype), Site.EMBED))
    comm.gather(summand(rank, 8, F32).view(1, 8), Site.LM_HEAD)
    comm.broadcast(summand(rank, 8, F32), Site.TOKEN_IDS)
    found.paths = [(c.kind, c.path, c.bytes) for c in heard.collectives]
    found.calls["all"] = list(shared.calls)
    comm.attach([])
    shared.calls.clear()
    comm.align()
    comm.rehearse(Kind.ALL_REDUCE, 4096, "bfloat16")()
    comm.rehearse(Kind.ALL_REDUCE, 128 * KIB, "bfloat16")()
    found.calls["unheard"] = list(shared.calls)
    found.staged = [
        layer_of(comm, False).partial(torch.ones(rows, 32)).data_ptr()
        == shared.buffer(1, F32).data_ptr()
        for rows in (5, MIB // 48 // 4 + 1)
    ]
    x = summand(9, 5 * 64, F32).view(5, 64)[:, 32 * rank : 32 + 32 * rank]
    for bias in (False, True):
        heard.collectives.clear()
        comm.attach([heard])
        residual = summand(10, 5 * 48, F32).view(5, 48)
        found.layers[bias] = reduce_add_norm(comm, bias)(x, residual)
        found.calls[bias] = [(c.path, c.site) for c in heard.collectives]
    comm.barrier()
    comm.close()
    out.send_bytes(pickle.dumps(vars(found)))


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    """What both ranks found."""
    return found_by_ranks(
        on_rank, 2, lambda context: [Buffers.of(2, MIB, context.Barrier(2, timeout=60))]
    )


def test_sums_are_exact_but_for_one_rounding(ranks: list[dict[str, Any]]) -> None:
    """Of two ranks: the sum in float64 (which is exact) rounded once, on both."""
    for place, (size, dtype) in enumerate(SIZES):
        exact = summand(0, size, dtype).double() + summand(1, size, dtype).double()
        for found in ranks:
            assert torch.equal(found["sums"][place], exact.to(dtype)), (size, dtype)


def test_each_collective_is_heard_once_with_its_own_path(ranks: list[dict[str, Any]]) -> None:
    sizes = [size * dtype.itemsize for size, dtype in SIZES]
    rooted = [(Kind.GATHER, "gloo", 64), (Kind.BROADCAST, "gloo", 32)]
    expected = [(Kind.ALL_REDUCE, p, n) for p, n in zip(PATHS, sizes, strict=True)] + rooted
    kernels = {ONE_SHOT: "one_shot", TWO_SHOT: "two_shot"}
    calls = [(kernels[p], n) for p, n in zip(PATHS, sizes, strict=True) if p in kernels]
    for found in ranks:
        assert found["paths"] == expected
        assert found["calls"]["all"] == calls


def test_what_is_rehearsed_takes_the_path_of_its_size(ranks: list[dict[str, Any]]) -> None:
    """`align` has 4 bytes and stays with the process group."""
    for found in ranks:
        assert found["calls"]["unheard"] == [("one_shot", 4096), ("two_shot", 128 * KIB)]


@pytest.mark.parametrize("bias", [False, True])
def test_row_parallel_sums_staged_and_not(ranks: list[dict[str, Any]], bias: bool) -> None:
    """The matmul's own result in the buffer, a copy of it, and a compiled step."""
    weight = summand(7, 48 * 64, F32).view(48, 64).double()
    x = summand(9, 5 * 64, F32).view(5, 64).double()
    added = summand(8, 48, F32).double() if bias else None
    total = F.linear(x, weight, added) + summand(10, 5 * 48, F32).view(5, 48).double()
    normed = 1.5 * total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-6)
    for found in ranks:
        for own in found["layers"][bias]:
            torch.testing.assert_close(own[0].double(), normed, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(own[1].double(), total, rtol=1e-5, atol=1e-3)
        assert found["calls"][bias] == [(ONE_SHOT, Site.ATTN_O_PROJ)] * 4
        assert found["staged"] == [True, False]


# -- what a machine without it says ---------------------------------------------------------------


def test_gpus_that_cannot_reach_each_other_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2 of 4, the first GPU being number 1."""
    asked = []

    def reaches(own: int, peer: int) -> bool:
        asked.append((own, peer))
        return peer != 4

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", reaches)
    with pytest.raises(ConfigError, match="GPU 3 cannot reach the memory of GPU 4.*comm=nccl"):
        SymmetricMemory(1024, 4, 2)
    assert asked == [(3, 1), (3, 2), (3, 4)]


def test_a_torch_that_cannot_share_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """This one has no CUDA."""
    if torch.cuda.is_available():
        pytest.skip("for a build without CUDA")
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "0")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, peer: True)
    with pytest.raises(ConfigError, match="cannot share 1024 bytes among 2 GPUs: .*comm=nccl"):
        SymmetricMemory(1024, 2, 0)
    assert symmetric_memory.os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"


def test_the_operators_are_in_this_torch() -> None:
    """Their arguments are given by place."""
    ops = torch.ops.symm_mem
    for operator in (ops.one_shot_all_reduce_out, ops.two_shot_all_reduce_out):
        names = [argument.name for argument in operator.default._schema.arguments]
        assert names[:3] == ["input", "reduce_op", "group_name"] and names[3] in ("out", "output")
        assert len(names) == 4


def test_ranks_are_connected_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.comm import ranks

    made: list[tuple[str, tuple[Any, ...]]] = []
    classes = ("FusedCommunicator", "SymmetricCommunicator", "ProcessGroupCommunicator")
    for name in classes:
        monkeypatch.setattr(ranks, name, lambda *a, _n=name: made.append((_n, a)))
    for comm in ("gloo", "nccl", "symm_mem", "symm_fused"):
        connect_rank(1, 2, comm, 77, 5.0, "10.0.0.1")
    assert made == [
        ("ProcessGroupCommunicator", (1, 2, "gloo", 77, 5.0, "10.0.0.1")),
        ("ProcessGroupCommunicator", (1, 2, "nccl", 77, 5.0, "10.0.0.1")),
        ("SymmetricCommunicator", (1, 2, 77, 5.0, "10.0.0.1")),
        ("FusedCommunicator", (1, 2, 77, 5.0, "10.0.0.1")),
    ]
