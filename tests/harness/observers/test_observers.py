"""Observers against a communicator that does nothing, so that what they record is known."""

from __future__ import annotations

import pickle
import subprocess
import sys
import time
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo.utils

from engine.comm.base import Communicator
from engine.comm.types import Kind, ObserverContext, Phase, Site, StepInfo
from harness import observers
from harness.observers import CaptureObserver, CountObserver, HostTimerObserver, NvtxObserver
from harness.observers.capture import Cuda


class Silent(Communicator):
    """A world of two whose collectives only note that they ran, or call `during`."""

    path = "silent"

    def __init__(self, during: Any = None) -> None:
        super().__init__(rank=0, world=2)
        self._during = during or (lambda: None)

    def _all_reduce(self, x: torch.Tensor) -> None:
        self._during()

    def _gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self._during()

    def _broadcast(self, x: torch.Tensor) -> None:
        self._during()

    def barrier(self) -> None: ...


def context(rank: int) -> ObserverContext:
    return ObserverContext(rank, 2, "cpu", align=lambda: None, rehearse=lambda *of: lambda: None)


def run_step(
    comm: Communicator, step: int, phase: Phase = Phase.DECODE, mode: str = "eager"
) -> None:
    """One step of a model without layers: 2 sequences of width 8, vocabulary 6."""
    info = StepInfo(step=step, phase=phase, batch=2, tokens=2, bucket=4, samples=2, mode=mode)
    comm.step_begin(info)
    comm.all_reduce(torch.zeros(2, 8), Site.EMBED)
    comm.all_reduce(torch.zeros(2, 8, dtype=torch.bfloat16), Site.ATTN_O_PROJ)
    comm.gather(torch.zeros(2, 3), Site.LM_HEAD)
    comm.broadcast(torch.zeros(2, dtype=torch.int64), Site.TOKEN_IDS)
    comm.step_end(info)


class RecordingNvtx:
    """Stands in for the package: `annotate` objects note when they are entered and left."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.built = 0

    def annotate(self, *, message: str, domain: str, category: str, payload: Any) -> Any:
        recorder, what = self, (message, domain, category, payload)
        self.built += 1

        class Range:
            def __enter__(self) -> Any:
                recorder.log.append(("push", *what))
                return self

            def __exit__(self, *error: Any) -> bool:
                recorder.log.append(("pop", *what))
                return False

        return Range()


def test_nvtx_names_domain_category_payload_and_nesting() -> None:
    nvtx, comm = RecordingNvtx(), Silent()
    observer = NvtxObserver(context(0), annotate=nvtx.annotate)
    comm.attach([observer])
    run_step(comm, 0)
    step = ("step/decode", "engine", "step", 2)
    embed = ("all_reduce/embed", "engine", "all_reduce", 64)
    o_proj = ("all_reduce/attn.o_proj", "engine", "all_reduce", 32)
    gather = ("gather/lm_head", "engine", "gather", 48)
    ids = ("broadcast/token_ids", "engine", "broadcast", 16)
    assert nvtx.log == [
        ("push", *step),
        ("push", *embed), ("pop", *embed),
        ("push", *o_proj), ("pop", *o_proj),
        ("push", *gather), ("pop", *gather),
        ("push", *ids), ("pop", *ids),
        ("pop", *step),
    ]  # fmt: skip
    assert all(type(entry[4]) is int for entry in nvtx.log)
    assert observer.result() == 5
    comm.close()


def test_nvtx_builds_each_range_once() -> None:
    nvtx, comm = RecordingNvtx(), Silent()
    comm.attach([NvtxObserver(context(0), annotate=nvtx.annotate)])
    for step in range(10):
        run_step(comm, step)
    assert (nvtx.built, len(nvtx.log)) == (5, 100)
    comm.close()


@pytest.mark.parametrize(
    ("phase", "mode", "message"),
    [
        (Phase.PREFILL, "eager", "step/prefill"),
        (Phase.MIXED, "compiled-model", "step/mixed"),
        (Phase.DECODE, "eager", "step/decode"),
        (Phase.DECODE, "graph", "step/replay"),
        (Phase.DECODE, "graph+compiled-model", "step/replay"),
        (Phase.PREFILL, "graph", "step/replay-prefill"),
        (Phase.MIXED, "graph+compiled-model", "step/replay-mixed"),
    ],
)
def test_nvtx_step_ranges(phase: Phase, mode: str, message: str) -> None:
    nvtx, comm = RecordingNvtx(), Silent()
    comm.attach([NvtxObserver(context(1), annotate=nvtx.annotate)])
    run_step(comm, 0, phase, mode)
    assert (nvtx.log[0][:2], nvtx.log[-1][:2]) == (("push", message), ("pop", message))
    comm.close()


def test_ranges_break_no_graph_and_run_at_every_call_of_compiled_code() -> None:
    """A range pushed inside traced code is a break, or an error under fullgraph, or is traced away.
    Here the tracer sees an operator, whose body runs each time."""
    nvtx, comm = RecordingNvtx(), Silent()
    comm.attach([NvtxObserver(context(0), annotate=nvtx.annotate)])

    def region(x: torch.Tensor) -> torch.Tensor:
        x = comm.all_reduce(x * 2, Site.ATTN_O_PROJ)
        return comm.all_reduce(x + 1, Site.MLP_DOWN_PROJ)

    counters = torch._dynamo.utils.counters
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(region, fullgraph=True, backend="aot_eager")
    for step in range(4):
        info = StepInfo(step, Phase.DECODE, 2, 2, 2, 2, "compiled-model")
        comm.step_begin(info)
        assert torch.equal(compiled(torch.ones(2, 8)), torch.full((2, 8), 3.0))
        comm.step_end(info)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert [entry[1] for entry in nvtx.log if entry[0] == "push"] == [
        "step/decode", "all_reduce/attn.o_proj", "all_reduce/mlp.down_proj"
    ] * 4  # fmt: skip
    comm.close()


def test_the_real_package_takes_the_ranges() -> None:
    pytest.importorskip("nvtx")
    comm = Silent()
    comm.attach([NvtxObserver(context(0))])
    run_step(comm, 0)
    comm.close()


def test_host_timer_records_what_ran_and_reads_outside_all_other_work() -> None:
    inside: list[int] = []
    comm = Silent(during=lambda: inside.append(time.perf_counter_ns()))
    timer = HostTimerObserver(context(0))
    comm.attach([timer])
    for step in (5, 6):
        run_step(comm, step)
    record = pickle.loads(pickle.dumps(timer.result()))
    rows, steps = record.collectives, record.steps
    assert rows["step"].tolist() == [5] * 4 + [6] * 4
    assert rows["ordinal"].tolist() == [0, 1, 2, 3] * 2
    assert (
        rows["kind"].tolist() == [Kind.ALL_REDUCE, Kind.ALL_REDUCE, Kind.GATHER, Kind.BROADCAST] * 2
    )
    assert rows["site"].tolist() == [Site.EMBED, Site.ATTN_O_PROJ, Site.LM_HEAD, Site.TOKEN_IDS] * 2
    assert rows["bytes"].tolist() == [64, 32, 48, 16] * 2
    assert [record.dtypes[i] for i in rows["dtype"][:4]] == [
        "float32",
        "bfloat16",
        "float32",
        "int64",
    ]
    assert {record.paths[i] for i in rows["path"]} == {"silent"}
    stamps = np.array(inside)
    assert (rows["before_ns"] <= stamps).all() and (stamps <= rows["after_ns"]).all()
    assert steps["step"].tolist() == [5, 6] and steps["batch"].tolist() == [2, 2]
    assert steps["bucket"].tolist() == [4, 4]
    assert (steps["begin_ns"] <= rows["before_ns"][[0, 4]]).all()
    assert (steps["end_ns"] >= rows["after_ns"][[3, 7]]).all()
    assert record.floor_ns >= 0 and record.tick_ns >= 1
    comm.close()


def test_host_timer_keeps_rows_when_its_buffers_grow() -> None:
    comm, timer = Silent(), HostTimerObserver(context(0))
    timer._collectives.array = timer._collectives.array[:4]
    timer._steps.array = timer._steps.array[:2]
    comm.attach([timer])
    for step in range(9):
        run_step(comm, step)
    record = timer.result()
    assert record.collectives["step"].tolist() == [s for s in range(9) for _ in range(4)]
    assert record.steps["step"].tolist() == list(range(9))
    assert (record.collectives["after_ns"] >= record.collectives["before_ns"]).all()
    comm.close()


def test_counts_by_kind_and_site_with_bytes() -> None:
    comm, counts = Silent(), CountObserver(context(0))
    comm.attach([counts])
    run_step(comm, 3)
    info = StepInfo(
        step=4, phase=Phase.PREFILL, batch=1, tokens=9, bucket=9, samples=0, mode="eager"
    )
    comm.step_begin(info)
    for _ in range(3):
        comm.all_reduce(torch.zeros(9, 8), Site.MLP_DOWN_PROJ)
    comm.step_end(info)
    record = pickle.loads(pickle.dumps(counts.result()))
    assert record.steps == {
        3: {("all_reduce", "embed"): [1, 64], ("all_reduce", "attn.o_proj"): [1, 32],
            ("gather", "lm_head"): [1, 48], ("broadcast", "token_ids"): [1, 16]},
        4: {("all_reduce", "mlp.down_proj"): [3, 864]},
    }  # fmt: skip
    comm.close()


def test_the_timer_is_attached_last_and_factories_survive_pickling() -> None:
    made = observers.factories(["collectives", "nvtx", "counts"])
    assert list(made) == ["counts", "nvtx", "collectives"]
    again = pickle.loads(pickle.dumps(made))
    assert isinstance(again["counts"](context(1)), CountObserver)
    assert isinstance(again["collectives"](context(1)), HostTimerObserver)
    assert list(observers.factories(["counts"])) == ["counts"]
    with pytest.raises(ValueError, match=r"instrument=\['events'\]: choose among counts, nvtx"):
        observers.factories(["counts", "events"])


def test_importing_the_observers_needs_no_nvtx() -> None:
    code = "import sys, harness.observers; assert 'nvtx' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_captured_range_stands_round_all_steps_and_ranks_meet_at_its_ends() -> None:
    log: list[str] = []
    noted = {name: partial(log.append, name) for name in ("start", "stop", "synchronize")}
    cuda = Cuda(**noted, sleep=lambda seconds: log.append(f"sleep {seconds}"))
    align = partial(log.append, "align")
    capture = CaptureObserver(
        ObserverContext(0, 2, "cuda:0", align=align, rehearse=lambda *_: align), cuda
    )
    comm = Silent(during=lambda: log.append("collective"))
    comm.attach([capture])
    meet = ["align", "synchronize"]
    begin = [*meet, "start", "sleep 0.5", *meet]
    run_step(comm, 7)
    assert log == begin + ["collective"] * 4
    run_step(comm, 8)
    assert log == begin + ["collective"] * 8
    assert capture.result() == 2
    assert log == begin + ["collective"] * 8 + [*meet, "sleep 0.5", "stop"]
    assert not capture.captures, "replays must be those of the clean graph"
    comm.close()


def test_a_pass_without_steps_opens_no_range() -> None:
    log: list[str] = []
    note = partial(log.append, "called")
    assert CaptureObserver(context(0), Cuda(note, note, note, lambda _: note())).result() == 0
    assert log == []
