"""A joined profile as tables: collectives, kernels, ranges, and the figures that need them"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.measuring.expected import check_expected, expected_bytes
from harness.measuring.pass_plan import HOST, LATENCY, NSYS
from harness.nsys.join import Profile
from harness.nsys.place import RankView, within
from harness.observers.records import DECODE, PHASES
from harness.rows import device as device_figures
from harness.rows import tables
from harness.rows.collectives import labels
from harness.rows.figures import FigureRows
from harness.tables.point_files import to_arrow

if TYPE_CHECKING:
    import pandas as pd

    from engine.shape import ModelShape
    from harness.tables.point_files import TableData

STAMPED = tuple(name for name in LATENCY if name != HOST)
"""Passes whose latencies are the device's, so that kernels compare with them."""


def write(
    folder: Path,
    key: Mapping[str, Any],
    profile: Profile,
    shape: ModelShape,
    collectives: pd.DataFrame,
) -> FigureRows:
    """Writes collectives, kernels, ranges and metrics of a run's profile into `folder`, and
    returns the figures.

    Args:
        key: run_id, point_id and process.
        collectives: the point's rows of other passes.

    Raises:
        AttributionError: a step without the collectives that the model must issue.
    """
    import pyarrow.parquet as pq

    joined = profile.joined
    check_expected(joined, shape)
    rows = figures(key, profile, collectives)
    named = {**key, "repeat": 0, "pass": NSYS}
    found: dict[str, TableData | pd.DataFrame] = {
        "kernels": kernels(profile).assign(**named),
        "ranges": ranges(profile).assign(**named),
        "metrics": rows.table(),
    }
    if len(joined.rows):
        found["collectives"] = tables.collectives(
            key, joined, expected_bytes(joined, shape), NSYS, 0, kernels=True
        )
    for name, data in found.items():
        pq.write_table(to_arrow(name, data), folder / f"{name}.parquet", compression="zstd")
    return rows


def kernels(profile: Profile) -> pd.DataFrame:
    """Every kernel of every rank, by rank and begin; columns of the table `kernels`."""
    import pandas as pd

    parts = []
    for view in profile.views:
        part = view.kernels[["name", "stream", "graph_node"]].assign(rank=view.rank)
        part["step"] = _numbers(profile, view.kernels["step"].to_numpy())
        part["ordinal"] = view.kernels["ordinal"].astype("Int64").mask(view.kernels["ordinal"] < 0)
        part["begin_us"] = _us(view.kernels["start_ns"] - _origin_ns(profile))
        part["kernel_us"] = _us(view.kernels["end_ns"] - view.kernels["start_ns"])
        parts.append(part)
    return pd.concat(parts, ignore_index=True)


def ranges(profile: Profile) -> pd.DataFrame:
    """Every NVTX range, by begin; columns of the table `ranges`."""
    frame = profile.export.ranges
    found = frame[["pid", "domain", "category", "message", "payload"]].copy()
    found["rank"] = frame["pid"].map({view.pid: view.rank for view in profile.views})
    found["rank"] = found["rank"].astype("Int64")
    index = np.full(len(frame), -1)
    for view in profile.views:
        own = (frame["pid"] == view.pid).to_numpy(bool)
        index[own] = within(view.steps, frame.loc[own, "tid"], frame.loc[own, "start_ns"])
    found["step"] = _numbers(profile, index)
    found["begin_us"] = _us(frame["start_ns"] - _origin_ns(profile))
    found["host_us"] = _us(frame["end_ns"] - frame["start_ns"])
    return found


def _origin_ns(profile: Profile) -> int:
    """Begin of the first step's range on any rank, from which both tables count."""
    return min(int(view.steps["start_ns"].iloc[0]) for view in profile.views)


def _numbers(profile: Profile, index: np.ndarray) -> pd.Series:
    """Numbers of the steps of these indices; <NA> where it is -1."""
    import pandas as pd

    return pd.Series(profile.numbers[index], dtype="Int64").mask(index < 0)


def _us(ns: pd.Series) -> pd.Series:
    return ns.astype("Float64") / 1e3


def idle_us(view: RankView) -> np.ndarray:
    """[S] time between the first and the last kernel of each step in which none ran."""
    inside = view.kernels[view.kernels["step"] >= 0].astype({"start_ns": int, "end_ns": int})
    busy_until = inside.groupby("step")["end_ns"].cummax().groupby(inside["step"]).shift()
    idle = (inside["start_ns"] - busy_until).clip(lower=0).groupby(inside["step"]).sum()
    return idle.reindex(range(len(view.steps)), fill_value=0.0).to_numpy() / 1e3


def figures(key: Mapping[str, Any], profile: Profile, collectives: pd.DataFrame) -> FigureRows:
    """Kernel times, launch gaps, and how far the stamps of the same point lie above the kernels."""
    rows, joined = FigureRows(key), profile.joined
    where: dict[str, Any] = {"pass_name": NSYS, "source": NSYS}
    device_figures.kernel_times(rows, joined, NSYS)
    idle = np.stack([idle_us(view) for view in profile.views], axis=1)[~profile.left_out]
    for code, phase in enumerate(PHASES):
        of_phase = idle[joined.steps["phase"] == code]
        reason = None if len(of_phase) else "no such step in the window"
        for ranks, of in (("min", np.min), ("max", np.max)):
            values = of(of_phase, axis=1) if len(of_phase) else []
            rows.summarise(
                "launch_gap_us", values, ranks=ranks, phase=phase, reason=reason, **where
            )
    stamped = _stamped(collectives)
    decode = joined.only(joined.steps["phase"] == DECODE)
    for kind, site, size in sorted({(int(r["kind"]), int(r["site"]), int(r["bytes"]))
                                    for r in decode.rows}):  # fmt: skip
        of_site = labels((DECODE, kind, site, size))
        latency = stamped.get(tuple(of_site[name] for name in ("kind", "site", "bytes")))
        times = device_figures.of_site(decode, kind, site, size)
        nothing = np.zeros((0, joined.world))
        device_figures.disagreement(
            rows, nothing if latency is None else latency, times, **of_site, **where
        )
    return rows


def _stamped(collectives: pd.DataFrame) -> dict[tuple[str, str, int], np.ndarray]:
    """{(kind, site, bytes): [M, R] latency_us} of decode steps, of the pass that has latencies."""
    timed = collectives[
        collectives["pass"].isin(STAMPED)
        & (collectives["phase"] == PHASES[DECODE])
        & collectives["latency_us"].notna()
    ]
    return {
        (str(kind), str(site), int(size)): group.pivot(
            index=["step", "ordinal"], columns="rank", values="latency_us"
        ).to_numpy(np.float64)
        for (kind, site, size), group in timed.groupby(["kind", "site", "bytes"])
    }
