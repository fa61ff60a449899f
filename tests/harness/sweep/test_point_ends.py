"""When repeats end, and points that are not ok: their status, its reason and what stays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.errors import EngineDeadError
from harness.machine import telemetry
from harness.measuring import window
from harness.measuring.failures import classify
from harness.sweep.passes import stop
from harness.sweep.point import PointOutcome
from tests.support.fake_backend import FakeBackend, make_cfg
from tests.support.points import measure

PLAN = {"min_repeats": 3, "max_repeats": 5, "rel_noise": 0.05, "wall_limit_s": 10.0}


@pytest.mark.parametrize(
    ("rates", "wall_s", "wanted"),
    [
        ([100.0, 100.0], 99.0, None),  # the minimum comes first
        ([100.0, 101.0, 99.0], 1.0, "noise"),
        ([100.0, 150.0, 50.0], 1.0, None),
        ([100.0, 150.0, 50.0], 10.0, "wall_limit"),
        ([100.0, 150.0, 50.0, 100.0, 10.0], 1.0, "max_repeats"),
    ],
)
def test_the_stopping_rule(rates: list[float], wall_s: float, wanted: str | None) -> None:
    assert stop(rates, wall_s, PLAN) == wanted


def test_a_short_output_is_an_error_not_a_fast_point(tmp_path: Path) -> None:
    backend = FakeBackend(make_cfg())
    backend.short = 2
    outcome, results, _ = measure(tmp_path, backend)
    assert outcome.status == "error"
    assert "short_output: 1 of 2 requests gave fewer tokens than asked; request 0: 3 of 5" in str(
        outcome.reason
    )
    assert len(results.metrics) == 0
    rows = results.requests
    assert rows["output_tokens"].tolist() == [3, 5] and rows["asked_tokens"].tolist() == [5, 5]


def test_a_build_inside_the_window_contaminates(tmp_path: Path) -> None:
    backend = FakeBackend(make_cfg())
    backend.grow = {"compiles": 2, "preemptions": 1}
    outcome, results, _ = measure(tmp_path, backend)
    assert outcome.status == "contaminated"
    assert outcome.reason == (
        "built inside the measured window: plain pass: compiles +2; host pass: compiles +2"
    )
    assert set(results.points["status"]) == {"contaminated"}
    assert results.points["preemptions"].tolist() == [1, 1]
    assert json.loads(results.points["counters"][0])["compiles"] == 2


@pytest.mark.parametrize(("device", "noted"), [("cpu", True), ("cuda", False)])
def test_a_busy_machine_is_noted_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str, noted: bool
) -> None:
    def reading(when: str) -> list[dict[str, Any]]:
        values = {"cpu_busy_s": 100.0 if when == "after" else 0.0, "cpu_own_s": 0.0, "cores": 2.0}
        return [
            {"when": when, "device": "cpu", "name": name, "unit": "s", "value": value}
            for name, value in values.items()
        ]

    monkeypatch.setattr(window, "read_telemetry", reading)
    monkeypatch.setattr(telemetry, "BUSY_WALL_S", 0.0)
    backend = FakeBackend(make_cfg(instrument=[]))
    backend.effective["device"] = device
    _, results, _ = measure(tmp_path, backend, instrument=[], device=device, timing="host")
    notes = results.points["notes"].fillna("")
    assert set(notes.str.contains("busy machine: other processes used ")) == {noted}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("enforce_eager", False, "enforce_eager: asked for True, the engine runs False"),
        ("page_size", 32, "page_size: asked for 16, the engine runs 32"),
        ("max_num_seqs", 8, "max_num_seqs: asked for 16, the engine runs 8"),
    ],
)
def test_another_configuration_than_asked_for_is_an_error(
    tmp_path: Path, name: str, value: Any, message: str
) -> None:
    backend = FakeBackend(make_cfg())
    backend.effective[name] = value
    outcome, results, _ = measure(tmp_path, backend)
    assert outcome.status == "error" and message in str(outcome.reason)
    assert backend.prompts == []
    assert results.points.iloc[0]["page_size"] == 16


def test_another_batch_than_asked_for_is_an_error(tmp_path: Path) -> None:
    cfg = make_cfg(batch=4)
    backend = FakeBackend(cfg)
    drain = backend.drain_steps

    def halved() -> list[np.ndarray]:
        logs = drain()
        for log in logs:
            log["batch"] //= 2
        return logs

    backend.drain_steps = halved  # type: ignore[method-assign]
    outcome, _, _ = measure(tmp_path, backend, batch=4)
    assert "batch: asked for 4, the engine decoded at most 2 sequences" in str(outcome.reason)


def test_a_failing_engine_becomes_a_row_and_is_not_used_again(tmp_path: Path) -> None:
    backend = FakeBackend(make_cfg())
    backend.fail = EngineDeadError(1, None, "Traceback ...\n  File x\nRuntimeError: boom")
    outcome, results, _ = measure(tmp_path, backend)
    assert outcome == PointOutcome("error", "rank 1: RuntimeError: boom", engine_alive=False)
    row = results.points.iloc[0]
    assert (row["status"], row["reason"], row["repeat"]) == ("error", outcome.reason, 0)
    assert "RuntimeError: boom" in row["traceback"]
    assert len(results.points) == 1


def test_a_clock_that_this_version_lacks_is_refused(tmp_path: Path) -> None:
    outcome, _, _ = measure(tmp_path, timing="stamps")
    assert outcome.status == "error" and "set timing=host" in str(outcome.reason)


def dead(exitcode: int | None, text: str = "") -> EngineDeadError:
    return EngineDeadError(1, exitcode, text)


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (MemoryError(), "oom", "MemoryError"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), "oom", "RuntimeError: CUDA"),
        (dead(None, "Traceback\n  x\ntorch.OutOfMemoryError: no"), "oom", "rank 1: torch.OutOf"),
        (TimeoutError("no answer"), "timeout", "TimeoutError: no answer"),
        (dead(None, "T\n  x\nRuntimeError: Timed out waiting"), "timeout", "rank 1: RuntimeError"),
        (AssertionError("x < y"), "error", "AssertionError: x < y"),
        (dead(-9), "killed", "rank 1 was ended by signal 9 (SIGKILL); the kernel sends it"),
        (dead(-11), "killed", "rank 1 was ended by signal 11 (SIGSEGV)"),
        (
            dead(None, "T\n  raise ValueError  # not out of memory\nValueError: bad"),
            "error",
            "rank 1: ValueError: bad",
        ),
    ],
)
def test_what_an_exception_means(error: Exception, status: str, reason: str) -> None:
    failure = classify(error)
    assert failure.status == status and failure.reason.startswith(reason)
    assert failure.traceback
