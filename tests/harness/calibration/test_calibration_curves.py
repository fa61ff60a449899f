"""Collectives by size: readings that are made up give figures worked out by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from harness.calibration.collectives import CollectiveMeter, Readings, row, rows
from harness.calibration.pairs import (
    LAUNCHED_ROUNDS,
    PAIRS,
    REPLAYED_ROUNDS,
    SPIN_US,
    StampPairs,
)
from harness.calibration.parts import Curve, marks, payload, plan, sizes
from harness.machine.capabilities import Machine
from tests.support.fake_gpu import FakeGpu, FakeRing, GpuCommunicator, HeldGpu

GRAPH = Curve("all_reduce", "nccl", 2, "graph")


def readings(pairs_ns: object, nbytes: int = 1_000_000, tick_ns: int = 10) -> Readings:
    found = np.array(pairs_ns, np.float64)
    return Readings(nbytes, "bfloat16", found, 2_000.0, tick_ns, "stamps")


def stamped(gpu: FakeGpu, *starved: int) -> tuple[StampPairs, HeldGpu]:
    held = HeldGpu(gpu, starved)
    return StampPairs(held, FakeRing(gpu, REPLAYED_ROUNDS)), held


def test_launched_pairs_are_read_in_their_order_and_the_warm_up_is_not() -> None:
    gpu = FakeGpu()
    pairs, _ = stamped(gpu)
    lengths = itertools.count(1)
    for measured in range(6):  # the ring of 32 rows wraps in the fourth
        found = pairs.measure("eager", lambda: gpu.work(77), lambda: gpu.work(next(lengths)))
        first = measured * PAIRS * (LAUNCHED_ROUNDS + 1) + PAIRS + 1
        wanted = np.arange(first, first + LAUNCHED_ROUNDS * PAIRS)
        assert found.ravel().tolist() == wanted.tolist()
    assert (pairs.floor_ns("eager"), pairs.floor_ns("graph")) == (3000.0, 2000.0)


def test_a_round_that_starved_is_left_out_and_the_next_spins_last_longer() -> None:
    gpu = FakeGpu()
    pairs, held = stamped(gpu, 1, 2)
    found = pairs.measure("eager", lambda: None, lambda: gpu.work(5))
    assert np.isnan(found).all(axis=1).tolist() == [False, True, True] + [False] * 5
    assert found[~np.isnan(found)].tolist() == [5.0] * 6 * PAIRS
    assert held.spins == [SPIN_US, SPIN_US, 2 * SPIN_US] + [4 * SPIN_US] * 5


def test_a_graph_holds_all_pairs_of_a_round_and_is_replayed() -> None:
    gpu = FakeGpu()
    pairs, held = stamped(gpu)
    begin = gpu.now
    for _ in range(2):
        found = pairs.measure("graph", lambda: gpu.work(300), lambda: gpu.work(7000))
        assert found.shape == (REPLAYED_ROUNDS, PAIRS) and (found == 7000).all()
    assert gpu.now - begin == 2 * (REPLAYED_ROUNDS + 2) * PAIRS * 7300  # warm-up and upload
    assert held.spins == []


def test_a_rank_measures_every_size_through_its_communicator() -> None:
    gpu = FakeGpu()
    pairs, _ = stamped(gpu)
    comm = GpuCommunicator(gpu, all_reduce_ns=5000)
    meter = CollectiveMeter(comm, "cuda:0", pairs)
    for kind, ns in (("all_reduce", 5000), ("gather", 7000), ("broadcast", 7000)):
        found = meter(f"{kind}/fake/2/graph")
        assert [(r.bytes, r.dtype) for r in found] == sizes(kind, "cuda")
        assert {float(t) for r in found for t in np.unique(r.pairs_ns)} == {ns}
        assert {(r.floor_ns, r.tick_ns, r.source) for r in found} == {(2000.0, 1024, "stamps")}
    comm.close()


def test_one_size_by_hand() -> None:
    """Less 2 us: rank 0 reads 10, 12, 10, 40 and rank 1 10, 10, 14, 40."""
    found = row(GRAPH, [readings([[12_000, 14_000], [12_000, 42_000]]),
                        readings([[12_000, 12_000], [16_000, 42_000]])])  # fmt: skip
    assert found["transfer_us"] == found["p50_us"] == 10.0 and found["stat"] == "p50"
    assert found["mean_us"] == 17.5  # of 10, 10, 10, 40
    assert (found["p10_us"], found["p90_us"]) == (10.0, pytest.approx(31.0))
    assert found["wait_us"] == (2 + 4) / 8
    assert found["algbw_GBps"] == pytest.approx(100.0)  # 1 MB in 10 us
    assert found["busbw_GBps"] == pytest.approx(100.0)  # 2(n-1)/n = 1
    assert (found["n"], found["n_starved"], found["reason"]) == (4, 0, None)
    four = row(Curve("all_reduce", "nccl", 4, "graph"), [readings([[12_000]])] * 4)
    assert four["busbw_GBps"] == pytest.approx(150.0)


def test_a_coarse_tick_gives_the_mean_and_no_percentile_of_single_ticks() -> None:
    ranks = [readings([[12_240, 13_264]] * 8, tick_ns=1_024)] * 2
    found = row(GRAPH, ranks)
    assert found["stat"] == "mean" and found["transfer_us"] == pytest.approx(10.752)
    assert found["p10_us"] == pytest.approx(10.24)
    short = row(GRAPH, [readings([[2_000, 3_024]], tick_ns=1_024)] * 2)
    assert short["transfer_us"] == 0.512 and short["p50_us"] is None


def test_rooted_kinds_take_the_roots_time() -> None:
    ranks = [readings([[22_000, 22_000]]), readings([[5_000, 5_000]])]
    gather = row(Curve("gather", "nccl", 2, "eager"), ranks)
    assert gather["transfer_us"] == 20.0 and gather["wait_us"] is None
    assert (gather["algbw_GBps"], gather["busbw_GBps"]) == (50.0, 25.0)
    broadcast = row(Curve("broadcast", "nccl", 2, "eager"), ranks)
    assert broadcast["busbw_GBps"] == broadcast["algbw_GBps"] == 50.0


def test_what_cannot_be_said_is_null_with_a_reason() -> None:
    nan = float("nan")
    found = row(GRAPH, [readings([[12_000], [nan]]), readings([[nan], [12_000]])])
    assert found["transfer_us"] is None and (found["n"], found["n_starved"]) == (0, 2)
    assert "starved" in found["reason"]
    found = row(GRAPH, [readings([[12_000], [nan]]), readings([[13_000], [12_000]])])
    assert found["transfer_us"] == 10.0 and (found["n"], found["n_starved"]) == (1, 1)
    found = row(GRAPH, [readings([[1_000, 1_000]])] * 2)
    assert found["transfer_us"] == -1.0 and found["algbw_GBps"] is None
    assert found["reason"] == "no bandwidth: the time is not above the floor"


def test_rows_carry_the_decode_steps_of_their_size() -> None:
    ranks = [[readings([[9_000]], 2048), readings([[9_000]], 3072)]] * 2
    found = rows("all_reduce/nccl/2/graph", ranks, "cuda")
    assert [r["mark"] for r in found] == ["0.6b x1", None]


def test_sizes_hold_the_payloads_of_published_models() -> None:
    """The table of hidden sizes, times 2 bytes: 2, 4, 5, 8, 10, 10 KiB at batch 1."""
    found = marks("all_reduce", "cuda")
    assert {s: m for s, m in found.items() if s <= 10 << 10} == {
        2 << 10: "0.6b x1", 4 << 10: "1.7b x1", 5 << 10: "4b x1", 8 << 10: "8b x1",
        10 << 10: "14b x1, 32b x1",
    }  # fmt: skip
    assert found[64 << 10] == "8b x8, 0.6b x32"
    measured = [size for size, _ in sizes("all_reduce", "cuda")]
    assert set(found) < set(measured) and (measured[0], measured[-1]) == (2 << 10, 64 << 20)
    assert sizes("gather", "cuda")[0] == (151_936 * 2, "bfloat16")
    assert sizes("broadcast", "cuda") == [(8 * n, "int64") for n in (1, 8, 32, 128, 256)]
    assert payload("gather", 1024, 151_936, 8, "float32") == 8 * 151_936 * 4
    assert all(size % (8 * 2) == 0 for size, _ in sizes("gather", "cuda"))  # of up to 8 ranks


def test_the_plan_names_every_kind_and_mode_of_a_world() -> None:
    machine = Machine(gpus=2, cores=2, cxx=None, packages={"triton": "3"})
    names = plan(machine, [2])
    fused = [f"all_reduce/symm_fused/2/{m}" for m in ("eager", "graph")]
    assert names == fused + [f"{k}/{path}/2/{m}" for path in ("symm_mem", "nccl")
                             for k in ("all_reduce", "gather", "broadcast")
                             for m in ("eager", "graph")]  # fmt: skip
    assert [Curve.named(name).name for name in names] == names
    assert plan(machine, [2, 1])[0] == "clock" and len(plan(machine, [1])) == 8
