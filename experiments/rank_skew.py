"""One rank delayed by a known time: does all of it, and nothing else, arrive as waiting?"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.base import (
    Column,
    Elsewhere,
    Experiment,
    ExperimentError,
    Finding,
    between,
    framed,
    labels,
)
from experiments.intervals import Interval, difference, mean, slope
from experiments.points import Point, named, points, shown
from harness.store import Results

if TYPE_CHECKING:
    import pandas as pd

PARTS = {"layers": ("attn.o_proj", "mlp.down_proj"), "embed": ("embed",)}
"""The embedding's all-reduce is told apart: ranks meet there, whatever else kept one of them."""
SLOPE, FLAT = 0.05, 0.10
"""How far the slope may be from 1, and transfer from its value without a delay."""
TICKS = 0.25
"""Waiting of so many ticks without a delay is what whole ticks make of none."""
COLUMNS = {
    "mode": Column("how the forward ran"),
    "part": Column("all-reduces of the layers, or the first of a step, where the ranks meet"),
    "steps": Column("decode steps, taking turns through the delays"),
    "slope": Column("us that the other ranks wait a collective for each us of delay", ".4f"),
    "slope_lo": Column("95 % interval of it, least squares over steps, variance HC3", ".4f"),
    "slope_hi": Column("upper end", ".4f"),
    "transfer_us": Column("mean transfer of a collective without a delay", ".2f"),
    "transfer_off": Column("how far its mean is from that under the delay that says most", "+.1%"),
    "transfer_off_lo": Column("95 % interval of it, Welch over steps", "+.1%"),
    "transfer_off_hi": Column("upper end", "+.1%"),
    "wait_0_us": Column(
        "mean wait of the others without a delay, by the minimum over ranks, which is never below "
        "0: the bias that `wait_us` has from ticks and jitter",
        ".3f",
    ),
    "lead_0_us": Column(
        "mean of their latency less the delayed rank's, without a delay; it has no such bias", ".3f"
    ),
    "lead_0_lo": Column("95 % interval of it", ".3f"),
    "lead_0_hi": Column("upper end", ".3f"),
    "tick_us": Column("the timer's step", ".3f"),
    "waited": Column("ranks that waited half of the longest delay or more"),
    "reason": Column("why there is no figure"),
}


def summary(results: Results) -> pd.DataFrame:
    """A row a point and part, with COLUMNS after the settings that vary.

    Raises:
        ExperimentError: no point has a skew pass.
    """
    found = [point for point in points(results) if point.everything["tp"] > 1]
    names, steps, ticks = shown(found), by_step(results), _ticks(results)
    rows = []
    for point in found:
        for part in PARTS:
            own = steps[(steps["point_id"] == point.point_id) & (steps["part"] == part)]
            row = dict.fromkeys(COLUMNS) | {"mode": point.mode, "part": part, "steps": len(own)}
            row |= {"tick_us": ticks.get(point.point_id)} | _row(point, own)
            rows.append(named(point.asked, names) | row)
    if not any(row["slope"] is not None for row in rows):
        why = "; ".join(dict.fromkeys(row["reason"] for row in rows)) or "no point above tp=1"
        raise ExperimentError(
            f"no point with delayed steps ({why}); measure one by "
            "python -m harness +experiment=rank_skew"
        )
    return framed(rows, names, COLUMNS)


def by_step(results: Results) -> pd.DataFrame:
    """A row a point, engine, decode step of its skew pass and part: the delay that was asked for
    and that came out, means over the step's all-reduces and the other ranks, and `waited`, the wait
    of each rank as {rank: us}."""
    import pandas as pd

    key = ["point_id", "process", "step"]
    rows = results.table(
        "collectives",
        [*key, "rank", "pass", "phase", "kind", "site", "latency_us", "transfer_us", "wait_us"],
    )
    chosen = (rows["pass"] == "skew") & (rows["phase"] == "decode") & (rows["kind"] == "all_reduce")
    rows = rows[chosen & rows["latency_us"].notna()]
    steps = results.table("steps", [*key, "rank", "pass", "skew_asked_us", "skew_us"])
    steps = steps[(steps["pass"] == "skew") & steps["skew_us"].notna()].drop(columns="pass")
    delayed = pd.Series(
        {p.point_id: p.everything.get("measure.skew_rank") for p in points(results)}, dtype="object"
    )
    steps = steps[steps["rank"] == steps["point_id"].map(delayed)].drop(columns="rank")
    rows = rows.assign(own=rows["rank"] == rows["point_id"].map(delayed))
    parts = []
    for part, sites in PARTS.items():
        of_part = rows[rows["site"].isin(sites)]
        others = of_part[~of_part["own"]].groupby(key)
        found = pd.DataFrame(
            {
                "wait_us": others["wait_us"].mean(),
                "transfer_us": others["transfer_us"].mean(),
                "lead_us": others["latency_us"].mean()
                - of_part[of_part["own"]].groupby(key)["latency_us"].mean(),
            }
        ).reset_index()
        waits = of_part.groupby([*key, "rank"])["wait_us"].mean().unstack("rank")
        found["waited"] = [waits.loc[tuple(k)].to_dict() for k in found[key].to_numpy()]
        parts.append(found.merge(steps, on=key).assign(part=part))
    return pd.concat(parts, ignore_index=True)


def _row(point: Point, steps: pd.DataFrame) -> dict[str, Any]:
    if point.failure is not None:
        return {"reason": point.failure}
    if steps.empty:
        return {"reason": "no skew pass whose steps have latencies (instrument skew, collectives)"}
    still = steps[steps["skew_asked_us"] == 0]
    if still.empty or len(still) == len(steps):
        return {"reason": "measure.skew_us needs 0 and other delays, and as many decode steps"}
    if len(steps) < 3:
        return {"reason": "fewer than three steps"}
    line, _ = slope(steps["skew_us"].to_numpy(float), steps["wait_us"].to_numpy(float))
    base = float(still["transfer_us"].mean())
    off = _moved(still, steps, base) if base > 0 else Interval(math.nan, math.nan, math.nan)
    lead = mean(still["lead_us"].to_numpy(float))
    longest = float(steps["skew_asked_us"].max())
    waits = _waits(steps[steps["skew_asked_us"] == longest])
    return {
        "slope": line.value, "slope_lo": line.lo, "slope_hi": line.hi,
        "transfer_us": base,
        "transfer_off": off.value, "transfer_off_lo": off.lo, "transfer_off_hi": off.hi,
        "wait_0_us": float(still["wait_us"].mean()),
        "lead_0_us": lead.value, "lead_0_lo": lead.lo, "lead_0_hi": lead.hi,
        "waited": ",".join(str(rank) for rank, us in waits.items() if us >= longest / 2),
    }  # fmt: skip


def _moved(still: pd.DataFrame, steps: pd.DataFrame, base: float) -> Interval:
    """By how much of `base` transfer is off under the delay that says most: one whose interval lies
    outside FLAT, else the one whose interval reaches farthest."""
    found = []
    for asked, own in steps.groupby("skew_asked_us"):
        if asked != 0:
            us = difference(*(of["transfer_us"].to_numpy(float) for of in (still, own)))
            found.append(Interval(us.value / base, us.lo / base, us.hi / base))

    def says(one: Interval) -> tuple[bool, float]:
        return one.within(-FLAT, FLAT) is False, max(abs(one.lo), abs(one.hi))

    return max(found, key=says)


def _waits(steps: pd.DataFrame) -> dict[int, float]:
    """Rank -> its mean wait."""
    ranks = sorted({rank for waits in steps["waited"] for rank in waits})
    return {r: float(np.mean([waits[r] for waits in steps["waited"]])) for r in ranks}


def _ticks(results: Results) -> dict[str, float]:
    rows = results.table("metrics", ["point_id", "name", "value"])
    rows = rows[(rows["name"] == "tick_us") & rows["value"].notna()]
    return {str(k): float(v) for k, v in rows.groupby("point_id")["value"].max().items()}


def holds(row: Any) -> dict[str, bool | None]:
    """The three parts of the claim in one row; None where the interval cannot tell. That a lead's
    interval meets 0 says nothing where it is wide: its half must be within FLAT of a transfer."""
    lead = Interval(row["lead_0_us"], row["lead_0_lo"], row["lead_0_hi"])
    near = TICKS * (row["tick_us"] or 0.0)
    off = Interval(row["transfer_off"], row["transfer_off_lo"], row["transfer_off_hi"])
    zero: bool | None = None
    if lead.known and (lead.lo > near or lead.hi < -near):
        zero = False
    elif lead.known and (lead.hi - lead.lo) / 2 <= FLAT * row["transfer_us"]:
        zero = True
    return {
        "slope": Interval(row["slope"], row["slope_lo"], row["slope_hi"]).within(
            1 - SLOPE, 1 + SLOPE
        ),
        "transfer": off.within(-FLAT, FLAT),
        "zero": zero,
    }


def verdict(frame: pd.DataFrame) -> Finding:
    """Of the layers' all-reduces of every point; each of the three parts must hold."""
    rows = frame[(frame["part"] == "layers") & frame["slope"].notna()]
    found = [holds(row) for _, row in rows.iterrows()]
    every = [value for one in found for value in one.values()]
    names = labels(rows, COLUMNS)
    failed, open_ones = (
        [
            f"{name}: {part}"
            for name, one in zip(names, found, strict=True)
            for part, value in one.items()
            if value is said
        ]
        for said in (False, None)
    )
    text = (
        f"the slope is {between(rows['slope'], '.3f')}; transfer moves by "
        f"{between(rows['transfer_off'], '+.1%')}; without a delay the others lead by "
        f"{between(rows['lead_0_us'], '.2f')} us, and the minimum over ranks makes of that a wait "
        f"of up to {rows['wait_0_us'].max():.2f} us"
    )
    if failed:
        text += f"; missed by {'; '.join(failed)}"
    elif open_ones:
        text += f"; intervals too wide to tell: {'; '.join(open_ones)}"
    return Finding(False if failed else True if all(every) else None, text)


def figure(results: Results, frame: pd.DataFrame, path: Path) -> None:
    """Waiting and transfer against the delay, step by step, a panel a point."""
    from matplotlib.figure import Figure

    own_rows = frame[frame["part"] == "layers"]
    found = [point.point_id for point in points(results) if point.everything["tp"] > 1]
    titles = dict(zip(found, labels(own_rows, COLUMNS), strict=True))
    steps = by_step(results)
    layers = steps[steps["part"] == "layers"]
    panels = list(layers.groupby("point_id", sort=False))
    columns = min(4, len(panels))
    lines = math.ceil(len(panels) / columns)
    drawing = Figure(figsize=(3.6 * columns, 3.6 * lines), layout="constrained")
    axes = drawing.subplots(lines, columns, squeeze=False).ravel()
    for ax in axes[len(panels) :]:
        ax.set_visible(False)
    for ax, (point_id, own) in zip(axes, panels, strict=False):
        end = float(own["skew_us"].max())
        ax.plot([0, end], [0, end], color="0.7", label="slope 1")
        ax.plot(own["skew_us"], own["wait_us"], "o", markersize=3, label="wait of the others")
        ax.plot(own["skew_us"], own["transfer_us"], "x", markersize=3, label="transfer")
        ax.set_title(titles[str(point_id)], fontsize=9)
        ax.set_xlabel("delay before each all-reduce, us")
        ax.set_xscale("symlog", linthresh=10)
        ax.set_yscale("symlog", linthresh=10)
        ax.set_ylabel("us a collective")
    axes[0].legend(fontsize=8)
    drawing.savefig(path, dpi=120)


EXPERIMENT = Experiment(
    name="rank_skew",
    question="One rank is late by a known time: does all of it, and nothing else, arrive as "
    "waiting?",
    claim="the others' wait grows one to one with the delay (slope 1 within 5 %), transfer stays "
    "within 10 %, and without a delay the others' mean lead is 0 within its interval and a quarter "
    "tick",
    source="the calibration of vllm-project/vllm#57037, by which #52777 would tell transfer from "
    "arrival skew",
    columns=COLUMNS,
    summary=summary,
    figure=figure,
    verdict=verdict,
    elsewhere=(
        Elsewhere(
            "ranks arrive 31.6 us apart at an all-reduce, 2.75 ms a token",
            "1Cat-vLLM#173, graphs, 87 collectives a step",
        ),
    ),
)
