"""Rows of the tables that are not figures: points, steps, collectives, requests, start-up."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.machine.hardware import VERSIONS
from harness.machine.nvml import used_bytes
from harness.observers.records import PHASES
from harness.settings.config import ENGINE_AXES
from harness.settings.effective import EFFECTIVE
from harness.tables import schema
from harness.tables.plain import jsonable
from harness.tables.point_files import TableData

if TYPE_CHECKING:
    from harness.backends.base import Backend
    from harness.measuring.attribution import Joined
    from harness.measuring.window import Window
    from harness.planning.plan import Point


def columns(table: str, rows: Sequence[Mapping[str, Any]]) -> TableData:
    """Rows -> columns; a key that a row lacks is None."""
    names = [c.name for c in schema.TABLES[table]]
    unknown = {key for row in rows for key in row} - set(names)
    if unknown:
        raise KeyError(f"{table} has no columns {sorted(unknown)}")
    present = [name for name in names if any(name in row for row in rows)]
    return {name: [row.get(name) for row in rows] for name in present}


def to_json(value: Any) -> str:
    """Compact JSON with sorted keys; NaN and infinities become null."""
    return json.dumps(jsonable(value), sort_keys=True, separators=(",", ":"), allow_nan=False)


def point_columns(
    point: Point, run_id: str, environment: Mapping[str, Any], effective: Mapping[str, Any] | None
) -> dict[str, Any]:
    """What every row of `points` says of its point, whatever became of it."""
    cfg, work, model = point.cfg, point.cfg["workload"], point.cfg["model"]
    row: dict[str, Any] = {"run_id": run_id, "point_id": point.point_id, "index": point.index}
    row |= {name: cfg[name] for name in ("backend", *ENGINE_AXES, "batch", "timing", "cache")}
    row |= {
        "experiment": cfg["experiment"],
        "model": model["name"],
        "model.path": model["path"],
        "model.load_format": model["load_format"],
        "workload": work["kind"],
        "measure": cfg["measure"]["name"],
        "instrument": ",".join(cfg["instrument"]),
        "requested": to_json(cfg),
    }
    asked = ("prompt_tokens", "output_tokens") if work["kind"] in ("decode", "prefill") else ()
    for name in (*asked, "num_requests", "arrivals", "temperature", "seed"):
        row[f"workload.{name}"] = work[name]
    versions, git = environment.get("versions", {}), environment.get("git", {})
    row |= {f"{name}_version": versions.get(name) for name in VERSIONS}
    row |= {
        "git_sha": git.get("sha"),
        "git_dirty": git.get("dirty"),
        "hardware_fingerprint": environment.get("fingerprint"),
        "host": environment.get("host"),
        "cpu": environment.get("cpu"),
        "cpu_cores": environment.get("cpu_cores"),
        "gpu": ", ".join(g["name"] for g in environment.get("gpus", ())) or None,
        "driver": environment.get("driver"),
        "environment": to_json(environment),
    }
    if effective is not None:
        row |= {f"effective.{name}": effective.get(name) for name in EFFECTIVE}
        row["effective"] = to_json(effective)
    return row


def window_columns(window: Window) -> dict[str, Any]:
    """What a repeat adds to its row of `points`."""
    return {
        "repeat": window.repeat,
        "effective.batch": window.decode_batch,
        "requests": len(window.outputs),
        "prompt_tokens": window.prompt_tokens,
        "output_tokens": window.output_tokens,
        "cached_tokens": window.counters.get("cached_tokens"),
        "preemptions": window.counters.get("preemptions"),
        "counters": to_json(window.counters),
        "started_at": window.started_at,
        "wall_s": window.wall_s,
    }


def collectives(
    key: Mapping[str, Any],
    joined: Joined,
    expected_bytes: np.ndarray,
    pass_name: str,
    repeat: int,
    *,
    kernels: bool = False,
) -> TableData:
    """N collectives x R ranks rows, rank by rank; `kernels`: the profiler's, whose times are those
    of kernels alone."""
    from engine.comm.types import Kind, Site
    from harness.measuring.attribution import bandwidth

    n, world = joined.latency_us.shape
    rows, step = joined.rows, joined.steps[joined.step_index]
    record = joined.records[0]
    span, starved = joined.span[joined.step_index], joined.starved[joined.step_index]
    why = np.full(n, None)
    for reason, rows_of in (
        ("rooted", (rows["kind"] != Kind.ALL_REDUCE) & ~joined.calibrated),
        ("span", span),
        ("starved", starved),
    ):
        why[rows_of] = reason
    by = np.full(n, "ranks", object)
    by[joined.calibrated] = "calibrated"
    by[np.isnan(joined.transfer_us)] = None
    algbw, busbw = bandwidth(joined)
    shared = {
        "step": rows["step"],
        "ordinal": rows["ordinal"].astype(np.int64),
        "phase": np.array(PHASES, object)[step["phase"]],
        "kind": np.array([k.label for k in Kind], object)[rows["kind"]],
        "site": np.array([s.label for s in Site], object)[rows["site"]],
        "layer": _nullable(joined.layer),
        "bytes": rows["bytes"],
        "expected_bytes": _nullable(expected_bytes),
        "dtype": np.array([*record.dtypes, ""], object)[rows["dtype"]],
        "mode": np.array([*record.modes, ""], object)[step["mode"]],
        "path": np.array([*record.paths, ""], object)[rows["path"]],
        "transfer_us": joined.transfer_us,
        "transfer_source": by,
        "transfer_reason": why,
        "algbw_GBps": algbw,
        "busbw_GBps": busbw,
        "world": filled(world, n),
        "pass": filled(pass_name, n),
        "repeat": filled(repeat, n),
        "source": filled(joined.source, n),
    }
    if pass_name == "backlog":
        shared["starved"] = starved.astype(object)
    table: dict[str, Any] = {name: np.concatenate([v] * world) for name, v in shared.items()}
    table["rank"] = np.repeat(np.arange(world), n)
    table["wait_us"] = joined.wait_us.T.ravel()
    table["kernel_us" if kernels else "latency_us"] = joined.latency_us.T.ravel()
    if not kernels:
        table["floor_us"] = joined.floor_us[joined.step_index].T.ravel()
        table["below_floor"] = table["latency_us"] < 0
    if span.any():
        table["span_us"] = np.where(span[:, None], joined.pair_us, np.nan).T.ravel()
    return with_key(key, table)


def requests(key: Mapping[str, Any], windows: Sequence[Window]) -> TableData:
    rows = []
    for window in windows:
        for place, (out, asked) in enumerate(zip(window.outputs, window.asked, strict=False)):
            rows.append(
                {
                    **key,
                    "repeat": window.repeat,
                    "pass": window.pass_name,
                    "request": place,
                    "request_id": out.request_id,
                    "prompt_tokens": len(out.prompt_token_ids),
                    "output_tokens": len(out.token_ids),
                    "asked_tokens": asked,
                    "arrival": out.arrival_s - window.begin_s,
                    "queue": out.queue_s,
                    "ttft": out.ttft_s,
                    "tpot": out.tpot_s,
                    "e2e": out.e2e_s,
                    "preemptions": out.preemptions,
                    "cached_tokens": out.cached_tokens,
                    "finish_reason": str(out.finish_reason),
                    "error": out.error,
                }
            )
    return columns("requests", rows)


def phases(key: Mapping[str, Any], backend: Backend, cache: str) -> TableData:
    """Start-up by phase, its captures by bucket, then the counters as they stand after the
    point."""
    shared = backend.points_served > 0
    rows: list[dict[str, Any]] = []
    for name, seconds in backend.startup.items():
        reason = None if seconds is not None else "this phase did not happen or is not timed"
        rows.append({"phase": name.removesuffix("_s"), "seconds": seconds, "reason": reason})
    for bucket, seconds, taken in backend.captures():
        rows.append({"phase": "capture", "bucket": bucket, "seconds": seconds, "bytes": taken})
    for name, count in backend.counters().items():
        rows.append({"phase": name, "count": count, "reason": "a counter"})
    return columns(
        "phases", [{**key, "repeat": 0, "cache": cache, "shared": shared, **r} for r in rows]
    )


def memory(key: Mapping[str, Any], backend: Backend) -> TableData:
    """What the engine says of each rank, and on GPUs what the rank's device has in use, which is
    read alike for every engine."""
    of_ranks = backend.memory()
    if backend.effective["device"] == "cuda":
        used = used_bytes(len(of_ranks))
        of_ranks = [
            {**one, "device_used_bytes": own} for one, own in zip(of_ranks, used, strict=True)
        ]
    rows = []
    for rank, readings in enumerate(of_ranks):
        for name, value in readings.items():
            reason = (
                None
                if value is not None
                else "not readable on this device, or the engine does not tell"
            )
            row = {"rank": rank, "name": name, "bytes": value, "reason": reason}
            rows.append({**key, "repeat": 0, **row})
    return columns("memory", rows)


def telemetry(key: Mapping[str, Any], windows: Sequence[Window]) -> TableData:
    rows = [
        {**key, "repeat": window.repeat, "pass": window.pass_name, **reading}
        for window in windows
        for reading in window.telemetry
    ]
    return columns("telemetry", rows)


def concatenated(parts: Sequence[TableData]) -> TableData:
    """Rows below each other; a column that a part lacks is null there."""
    lengths = [len(next(iter(part.values()))) for part in parts]
    return {
        name: np.concatenate(
            [part.get(name, np.full(n, None)) for part, n in zip(parts, lengths, strict=True)]
        )
        for name in dict.fromkeys(name for part in parts for name in part)
    }


def filled(value: Any, n: int) -> np.ndarray:
    return np.full(n, value, dtype=object if isinstance(value, str) else np.int64)


def _nullable(values: np.ndarray) -> np.ndarray:
    """-1 stands for null."""
    found = values.astype(object)
    found[values < 0] = None
    return found


def with_key(key: Mapping[str, Any], table: dict[str, np.ndarray]) -> TableData:
    n = len(next(iter(table.values()), ()))
    return {**{name: filled(value, n) for name, value in key.items()}, **table}
