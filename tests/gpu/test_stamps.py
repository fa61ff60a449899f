"""Readings of the GPU's timers against work of known length, launched and in graphs; then whole
points on two GPUs, where stamps must agree with CUPTI."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine import LLM, SamplingParams
from engine.comm.base import Communicator
from engine.comm.fused import FUSED
from engine.comm.symmetric import ONE_SHOT
from engine.comm.types import CollectiveObserver, ObserverContext, Phase, Site, StepInfo
from harness.backends import create
from harness.observers import BacklogObserver, EventObserver, Stamp, StampObserver
from harness.store import Results, load
from harness.sweep.point import measure_point
from tests.gpu.conftest import HEADS
from tests.support.checkpoints import Checkpoints
from tests.support.fake_backend import make_cfg, make_point

pytestmark = pytest.mark.gpu
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

WORK_US = 300.0
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


class SpinCommunicator(Communicator):
    """A world of two in one process, whose all-reduces keep the GPU busy for WORK_US."""

    path = "spin"

    def __init__(self) -> None:
        from harness.observers.stamp_kernels import Spin

        super().__init__(rank=0, world=2, device="cuda:0")
        self._spin = Spin("cuda:0")
        self._spin.set_ns(round(WORK_US * 1e3))

    def _all_reduce(self, x: torch.Tensor) -> None:
        self._spin()

    def _gather(self, x: torch.Tensor, out: torch.Tensor) -> None: ...

    def _broadcast(self, x: torch.Tensor) -> None: ...

    def barrier(self) -> None: ...


def context(align: Any = lambda: None) -> ObserverContext:
    return ObserverContext(0, 2, "cuda:0", align, lambda *of: lambda: None)


def info(step: int, mode: str) -> StepInfo:
    return StepInfo(step, Phase.DECODE, batch=1, tokens=1, bucket=1, samples=1, mode=mode)


def timer(kind: str) -> Any:
    return StampObserver(context()) if kind == "stamps" else EventObserver(context())


def tolerance_us(record: Any) -> float:
    """Two ticks; the floor's own spread; and one trip of the spin's loop."""
    return 2 * record.tick_ns / 1e3 + 3.0


def replayed(comm: SpinCommunicator, x: torch.Tensor, times: int) -> None:
    """Captures a step of three all-reduces as the engine does and replays it."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    comm.step_begin(info(0, "graph"))
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        with comm.capturing(info(-1, "graph"), observed=True):
            for _ in range(3):
                comm.all_reduce(x, Site.EMBED)
        graph.capture_end()
    torch.cuda.synchronize()
    for number in range(times):
        if number:
            comm.step_begin(info(number, "graph"))
        graph.replay()
        comm.step_end(info(number, "graph"))
    torch.cuda.synchronize()


def test_the_tick_and_the_floors_are_small_and_not_zero() -> None:
    record = StampObserver(context()).result()
    assert 1 <= record.tick_ns <= 4096
    assert record.graph_floor_ns is not None
    assert 500 <= record.graph_floor_ns <= 6000 and 500 <= record.floor_ns <= 10_000


@pytest.mark.parametrize("kind", ["stamps", "events"])
def test_work_of_known_length_in_a_graph(kind: str) -> None:
    comm, observer, x = SpinCommunicator(), timer(kind), torch.zeros(8, device="cuda")
    comm.attach([observer])
    replayed(comm, x, times=20)
    record = observer.result()
    assert record.steps["step"].tolist() == list(range(1, 20))  # 0 captured
    assert record.collectives["ordinal"].tolist() == [0, 1, 2] * 19
    pairs = (record.collectives["after_ns"] - record.collectives["before_ns"]) / 1e3
    # The floor holds a tiny kernel's own run, which a longer kernel takes the place of.
    assert np.median(pairs) == pytest.approx(WORK_US, abs=record.graph_floor_ns / 1e3 + 3)
    assert np.abs(pairs - np.median(pairs)).max() <= tolerance_us(record) + 5
    steps = (record.steps["end_ns"] - record.steps["begin_ns"]) / 1e3
    assert (steps >= 3 * WORK_US - tolerance_us(record)).all()
    assert (steps <= 3 * (WORK_US + 15)).all()
    comm.close()


@pytest.mark.parametrize("kind", ["stamps", "events"])
def test_work_of_known_length_behind_a_backlog(kind: str) -> None:
    comm, observer, x = SpinCommunicator(), timer(kind), torch.zeros(8, device="cuda")
    backlog = BacklogObserver(context(), 20_000.0)
    comm.attach([backlog, observer])
    for number in range(12):
        comm.step_begin(info(number, "eager"))
        for _ in range(3):
            comm.all_reduce(x, Site.EMBED)
        comm.step_end(info(number, "eager"))
        torch.cuda.synchronize()
    record = observer.result()
    kept = ~backlog.result().starved
    assert kept.sum() >= 10
    rows = record.collectives[np.isin(record.collectives["step"], np.flatnonzero(kept))]
    pairs = (rows["after_ns"] - rows["before_ns"]) / 1e3
    assert np.median(pairs) == pytest.approx(WORK_US, abs=record.floor_ns / 1e3 + 3)
    comm.close()


def test_a_backlog_that_is_too_short_is_noticed() -> None:
    comm, x = SpinCommunicator(), torch.zeros(8, device="cuda")
    backlog = BacklogObserver(context(), 1.0)
    comm.attach([backlog])
    comm.step_begin(info(0, "eager"))
    torch.cuda.synchronize()
    comm.all_reduce(x, Site.EMBED)
    comm.step_end(info(0, "eager"))
    record = backlog.result()
    assert record.starved.tolist() == [True] and record.spin_us == 2.0
    comm.close()


def test_the_ring_is_read_when_it_is_full() -> None:
    from harness.observers.device import SLOTS
    from harness.observers.stamp_kernels import Stamps

    comm = SpinCommunicator()
    observer: CollectiveObserver = StampObserver(context(), ring=Stamps(4, SLOTS, "cuda:0"))
    comm.attach([observer])
    replayed(comm, torch.zeros(8, device="cuda"), times=11)
    record = observer.result()
    assert record.steps["step"].tolist() == list(range(1, 11))
    steps = (record.steps["end_ns"] - record.steps["begin_ns"]) / 1e3
    assert (steps > 3 * WORK_US - 10).all() and (np.diff(record.steps["begin_ns"]) > 0).all()
    comm.close()


@pytest.mark.parametrize("eager", [True, False])
def test_an_engine_has_a_device_time_for_each_step(checkpoints: Checkpoints, eager: bool) -> None:
    path = checkpoints(dtype="bfloat16", hidden_size=64, max_position=1024, **HEADS)
    prompts = [[1, 2, 3, 4], [5, 6, 7]]
    options: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 256, "num_pages": 16}
    with LLM(str(path), enforce_eager=eager, **options) as llm:
        before = [out.token_ids for out in llm.generate(prompts, GREEDY)]
        llm.attach([Stamp(collectives=False)])
        llm.generate(prompts, GREEDY)
        llm.drain_steps()
        again = [out.token_ids for out in llm.generate(prompts, GREEDY)]
        numbers = llm.drain_steps()[0]["step"]
        [[record]] = llm.detach()
        assert again == before
        assert [out.token_ids for out in llm.generate(prompts, GREEDY)] == before
        record = record.of_steps(numbers)
        assert record.steps["step"].tolist() == numbers.tolist()
        assert (record.steps["end_ns"] > record.steps["begin_ns"]).all()
        modes = {record.modes[m] for m in record.steps["mode"][1:]}
        assert modes == ({"eager"} if eager else {"graph"})
        buckets = {bucket for bucket, _, _ in llm.captures()}
        assert not buckets if eager else buckets >= {1, 2, 4}


def point(tmp_path: Path, compile_cache: Path, **changes: Any) -> Results:
    """A whole point of a small model with wide rows over two GPUs."""
    cfg = make_cfg(
        results_dir=str(tmp_path / "runs"), batch=4, device="cuda", page_size=None,
        workload__prompt_tokens=16, workload__output_tokens=40, engine__max_num_seqs=4,
        model__name="qwen3-0.6b", model__load_format="dummy", measure__min_repeats=1,
        measure__max_repeats=1, engine__max_model_len=256, engine__num_pages=32, **changes,
    )  # fmt: skip
    backend = create()
    backend.start(cfg, compile_cache)
    run = tmp_path / "runs" / "run"
    try:
        outcome = measure_point(backend, make_point(cfg), run / "points" / "p")
    finally:
        backend.close()
    assert outcome.status == "ok", outcome.reason
    return load(run)


def values(results: Results, name: str, stat: str, **where: Any) -> Any:
    rows = results.metrics
    rows = rows[(rows["name"] == name) & (rows["stat"] == stat) & rows["value"].notna()]
    for column, value in where.items():
        rows = rows[rows[column] == value]
    return rows


@two_gpus
@pytest.mark.parametrize(
    ("comm", "enforce_eager", "compile_scope"),
    [
        ("symm_mem", False, "off"),
        ("symm_fused", False, "off"),
        ("nccl", False, "off"),
        ("symm_mem", True, "off"),
        ("nccl", True, "model"),
    ],
)
def test_latency_agrees_with_cupti(
    tmp_path: Path, compile_cache: Path, comm: str, enforce_eager: bool, compile_scope: str
) -> None:
    """By NCCL where code is compiled: over symmetric memory a sum is a copy as well there."""
    results = point(
        tmp_path, compile_cache, comm=comm, enforce_eager=enforce_eager, compile=compile_scope,
        timing="stamps", instrument=["collectives", "counts", "profiler"],
    )  # fmt: skip
    own = "backlog" if enforce_eager else "graph_timed"
    rows = results.collectives
    rows = rows[(rows["pass"] == own) & rows["latency_us"].notna() & (rows["phase"] == "decode")]
    reduces = rows[rows["kind"] == "all_reduce"]
    assert len(reduces) > 57 * 20 * 2
    assert 2 < reduces["transfer_us"].median() < 60
    assert set(reduces["bytes"]) == {4 * 1024 * 2}
    paths = {"nccl": {"nccl"}, "symm_mem": {ONE_SHOT}, "symm_fused": {FUSED, ONE_SHOT}}
    assert set(reduces["path"]) == paths[comm]
    if enforce_eager:
        spans = results.collectives["span_us"]
        assert spans.median() > reduces["latency_us"].median()
    shares = values(results, "comm_share", "value", phase="decode", ranks="max")
    assert 0 < shares["value"].iloc[0] < 1
    notes = results.points["notes"][0]
    assert notes is None or "profiler" not in str(notes), notes
    compared = values(results, "stamp_vs_cupti_us", "value", kind="all_reduce", ranks="min")
    # Not the embedding's: a step's first collective waits for the slower host, on both ranks.
    compared = compared[compared["site"] != "embed"]
    kernels = values(results, "kernel_us", "p50", kind="all_reduce", ranks="min")
    assert len(compared) == 2
    limit = max(3.0, 0.1 * float(kernels["value"].median()))
    assert compared["value"].abs().max() <= limit, compared[["site", "ranks", "value"]]
    # Every profiled step but the first was found between its marks; on one stream nothing overlaps.
    steps = results.steps[results.steps["kernels"].notna()]
    assert set(steps["pass"]) == {"profiler"} and len(steps) == 11 * 2
    whole = steps[["compute_us", "comm_kernel_us", "idle_us"]].sum(axis=1)
    assert (whole / steps["device_us"]).between(0.99, 1.01).all(), steps


@two_gpus
def test_the_readings_cost_little_in_a_graph(tmp_path: Path, compile_cache: Path) -> None:
    results = point(
        tmp_path, compile_cache, enforce_eager=False, timing="stamps", instrument=["collectives"]
    )
    cost = values(results, "instrument_us", "value", phase="decode", **{"pass": "graph_timed"})
    assert cost["value"].iloc[0] <= 3.0
    steps = results.steps
    clean = steps[(steps["pass"] == "step") & (steps["phase"] == "decode")]
    assert clean["device_us"].notna().all() and (clean["device_us"] > 100).all()


@two_gpus
def test_events_in_a_graph_can_be_chosen(tmp_path: Path, compile_cache: Path) -> None:
    results = point(
        tmp_path, compile_cache, enforce_eager=False, timing="events", instrument=["collectives"]
    )
    rows = results.collectives
    rows = rows[(rows["mode"] == "graph") & (rows["kind"] == "all_reduce")]
    assert set(rows["source"]) == {"events"} and rows["latency_us"].notna().all()
