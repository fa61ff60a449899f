"""Run folders with figures made up for the test: what a verdict must find is known."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from harness.rows.figures import FigureRows
from harness.sweep.point import status_only_tables
from harness.tables.point_files import write_point
from tests.support.fake_backend import make_cfg, make_point

MACHINE = {
    "fingerprint": "machine-1", "cpu": "a CPU", "cpu_cores": 2,
    "git": {"sha": "0123456789", "dirty": False}, "versions": {"torch": "2.13.0"},
}  # fmt: skip
Engines = Sequence[Sequence[float]]


def noisy(
    engines: int, repeats: int, *, between: float, within: float, seed: int, centre: float = 100.0
) -> list[list[float]]:
    """Log-normal figures round `centre` with these relative standard deviations."""
    rng = np.random.default_rng(seed)
    logs = rng.normal(0, between, (engines, 1)) + rng.normal(0, within, (engines, repeats))
    found: list[list[float]] = (centre * np.exp(logs)).tolist()
    return found


def write_cell(
    run: Path,
    rates: Engines,
    *,
    index: int = 0,
    status: str = "ok",
    reason: str | None = None,
    machine: dict[str, Any] | None = None,
    effective: dict[str, Any] | None = None,
    **changes: Any,
) -> None:
    """A point whose engines have `rates` as output tok/s of their repeats; a request's TPOT is then
    2 / rate s, and a step of two ranks lasts 1e6 / rate us on the slower one. `changes` are those
    of fake_backend.make_cfg; `effective` is what its engines read back, nothing by default. Without
    rates the point has one row that says `status`."""
    point_id = f"{index:012x}"
    point = make_point(make_cfg(**changes), point_id, index)
    for process, of_engine in enumerate(rates or [[]]):
        tables: dict[str, Any] = status_only_tables(
            point, status, reason, run_id=run.name, process=process,
            environment=machine or MACHINE, effective=effective or {},
        )  # fmt: skip
        if of_engine:
            one = dict(tables["points"])
            tables["points"] = {name: v * len(of_engine) for name, v in one.items()}
            tables["points"]["repeat"] = list(range(len(of_engine)))
            key = {"run_id": run.name, "point_id": point_id, "process": process}
            tables |= _figures(key, list(of_engine))
        write_point(run / "points" / f"{point_id}-{process}", tables)


def _figures(key: dict[str, Any], rates: list[float]) -> dict[str, Any]:
    rows = FigureRows(key)
    for repeat, rate in enumerate(rates):
        rows.add("output_tok_s", rate, n=1, pass_name="plain", repeat=repeat)
        rows.add("tok_s_per_gpu", None, n=0, pass_name="plain", repeat=repeat, reason="no GPU")
    rows.summarise("output_tok_s", rates, pass_name="plain")
    return {
        "metrics": rows.table(),
        "requests": _requests(key, rates),
        "steps": _steps(key, rates),
    }


def _requests(key: dict[str, Any], rates: list[float]) -> dict[str, Any]:
    """Three requests a repeat, the middle one at 2 / rate; and a slow pass that counts nowhere."""
    found = [
        {**key, "repeat": repeat, "pass": name, "request": place, "request_id": f"r{place}",
         "prompt_tokens": 4, "output_tokens": 5, "asked_tokens": 5, "tpot": 2 / rate * factor,
         "preemptions": 0, "cached_tokens": 0, "finish_reason": "length"}
        for repeat, rate in enumerate(rates)
        for name, slow in (("plain", 1), ("host", 50))
        for place, factor in enumerate((0.5 * slow, 1.0 * slow, 9.0 * slow))
    ]  # fmt: skip
    return columns(found)


def _steps(key: dict[str, Any], rates: list[float]) -> dict[str, Any]:
    """A long prefill step, then three decode steps of which the middle one lasts 1e6 / rate."""
    found = [
        {**key, "repeat": repeat, "rank": rank, "pass": "plain", "step": 10 * repeat + place,
         "phase": phase, "batch": 1, "tokens": 1, "bucket": 1, "samples": 1, "mode": "eager",
         "begin_ns": 0, "device_us": 1e6 / rate * factor * (0.5 if rank == 0 else 1.0),
         "host_us": 2e6 / rate if rank == 0 else None, "padding": 0.0, "source": "host"}
        for repeat, rate in enumerate(rates)
        for rank in (0, 1)
        for place, (phase, factor) in enumerate(
            (("prefill", 20.0), ("decode", 0.9), ("decode", 1.0), ("decode", 3.0))
        )
    ]  # fmt: skip
    return columns(found)


def columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in rows[0]}
