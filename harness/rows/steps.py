"""Rows of the table of steps: the log of the engine, device times, kernels, planted delays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.measuring.pass_plan import PROFILER
from harness.observers.records import PHASES
from harness.rows.tables import filled, with_key
from harness.tables.point_files import TableData

if TYPE_CHECKING:
    from harness.measuring.attribution import Joined
    from harness.measuring.window import Window
    from harness.observers.records import ProfileRecord, SkewRecord

# Column -> field of SPLIT_DTYPE.
_OF_SPLIT = {
    "device_us": "extent_ns", "compute_us": "compute_ns", "comm_kernel_us": "communication_ns",
    "idle_us": "idle_ns", "idle_comm_us": "beside_ns",
}  # fmt: skip


def steps(
    key: Mapping[str, Any],
    windows: Sequence[Window],
    mode: str,
    timed: Mapping[str, Joined] | None = None,
    skews: Mapping[str, Sequence[SkewRecord]] | None = None,
    profiles: Sequence[ProfileRecord] = (),
) -> TableData:
    """The step logs of all windows and ranks.

    Args:
        mode: of the engine; a step that was no replay ran as the rest of it says.
        timed: on a GPU, passes whose steps have device times. There the log's own clock saw the
            host enqueue, and is no time of a step. None: on a CPU the forward is synchronous, so
            that the rank's clock gives its time. Empty: none has.
        skews: by pass and rank, the delays that were put before its all-reduces.
        profiles: what CUPTI saw in the profiler pass; the first step of each is left out, in which
            ranks wait for each other's profilers.
    """
    parts: dict[str, list[np.ndarray]] = {}

    def put(name: str, values: np.ndarray) -> None:
        parts.setdefault(name, []).append(values)

    of_rank = {profile.rank: profile for profile in profiles}
    launched = mode.removeprefix("graph").removeprefix("+") or "eager"
    for window in windows:
        joined = None if timed is None else timed.get(window.pass_name)
        for rank, rows in enumerate(window.steps):
            n = len(rows)
            for name in ("step", "batch", "tokens", "bucket", "samples", "begin_ns"):
                put(name, rows[name].astype(np.int64))
            put("phase", np.array(PHASES, object)[rows["phase"]])
            put("mode", np.where(rows["replayed"], mode, launched).astype(object))
            own = (rows["end_ns"] - rows["begin_ns"]) / 1e3
            profile = of_rank.get(rank) if window.pass_name == PROFILER else None
            seen = _kernel_columns(rows["step"], profile)
            device = own if timed is None else _device_us(rows["step"], joined, rank)
            seen["device_us"] = device if profile is None else seen["device_us"]
            for name, values in seen.items():
                put(name, values)
            wall_us = (rows["wall_end_ns"] - rows["wall_begin_ns"]) / 1e3
            put("host_us", wall_us if rank == 0 else np.full(n, np.nan))
            bucket = np.maximum(rows["bucket"], 1)
            put("padding", (rows["bucket"] - rows["tokens"]) / bucket)
            fixed = {"rank": rank, "repeat": window.repeat, "pass": window.pass_name}
            source = "host" if joined is None else joined.source
            source = source if profile is None else "cupti"
            for name, values in _skew_columns(rows["step"], window, rank, skews or {}).items():
                put(name, values)
            for name, value in {**fixed, "source": source}.items():
                put(name, filled(value, n))
    return with_key(key, {name: np.concatenate(values) for name, values in parts.items()})


def _device_us(numbers: np.ndarray, joined: Joined | None, rank: int) -> np.ndarray:
    """Times of the steps of these numbers; NaN where the pass did not time one."""
    found = np.full(len(numbers), np.nan)
    if joined is not None:
        _, ours, theirs = np.intersect1d(numbers, joined.steps["step"], return_indices=True)
        found[ours] = joined.step_us[theirs, rank]
    return found


def _kernel_columns(numbers: np.ndarray, profile: ProfileRecord | None) -> dict[str, np.ndarray]:
    """What CUPTI saw of one rank's profiled steps; NaN and None elsewhere. The first one is left
    out."""
    found = {name: np.full(len(numbers), np.nan) for name in _OF_SPLIT}
    counts = np.full(len(numbers), None)
    if profile is not None:
        _, ours, theirs = np.intersect1d(numbers, profile.steps["step"][1:], return_indices=True)
        splits = profile.splits[1:][theirs]
        for name, field in _OF_SPLIT.items():
            found[name][ours] = splits[field] / 1e3
        counts[ours] = splits["kernels"].tolist()
    return {**found, "kernels": counts}


def _skew_columns(
    numbers: np.ndarray, window: Window, rank: int, skews: Mapping[str, Sequence[SkewRecord]]
) -> dict[str, np.ndarray]:
    """skew_asked_us of the delayed rank, on every rank's row, and skew_us, which this rank's own
    delays took on average; NaN outside the skew pass."""
    asked, taken = np.full((2, len(numbers)), np.nan)
    records = [r for r in skews.get(window.pass_name, ()) if r.rank == rank]
    for record in records:
        _, ours, theirs = np.intersect1d(numbers, record.steps, return_indices=True)
        asked[ours], taken[ours] = record.asked_us[theirs], record.taken_us[theirs]
    return {"skew_asked_us": asked, "skew_us": taken}
