"""One rank delayed by a known time: does all of it, and nothing else, arrive as waiting?"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.base import Column, Elsewhere, Experiment, ExperimentError, Finding
from experiments.intervals import Interval, mean, slope
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
    "transfer_off": Column("farthest that its mean is from that under any delay", ".1%"),
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
    import pandas as pd

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
    return pd.DataFrame(rows, columns=[*names, *COLUMNS])


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
    transfers = steps.groupby("skew_asked_us")["transfer_us"].mean()
    base = float(transfers[0.0])
    off = float((transfers / base - 1).abs().max()) if base > 0 else None
    lead = mean(still["lead_us"].to_numpy(float))
    longest = float(steps["skew_asked_us"].max())
    waits = _waits(steps[steps["skew_asked_us"] == longest])
    return {
        "slope": line.value, "slope_lo": line.lo, "slope_hi": line.hi,
        "transfer_us": base, "transfer_off": off,
        "wait_0_us": float(still["wait_us"].mean()),
        "lead_0_us": lead.value, "lead_0_lo": lead.lo, "lead_0_hi": lead.hi,
        "waited": ",".join(str(rank) for rank, us in waits.items() if us >= longest / 2),
    }  # fmt: skip


def _waits(steps: pd.DataFrame) -> dict[int, float]:
    """Rank -> its mean wait."""
    ranks = sorted({rank for waits in steps["waited"] for rank in waits})
    return {r: float(np.mean([waits[r] for waits in steps["waited"]])) for r in ranks}


def _ticks(results: Results) -> dict[str, float]:
    rows = results.table("metrics", ["point_id", "name", "value"])
    rows = rows[(rows["name"] == "tick_us") & rows["value"].notna()]
    return {str(k): float(v) for k, v in rows.groupby("point_id")["value"].max().items()}


def holds(row: Any) -> dict[str, bool | None]:
    """The three parts of the claim in one row; None where the interval cannot tell."""
    lead = Interval(row["lead_0_us"], row["lead_0_lo"], row["lead_0_hi"])
    tick = row["tick_us"] or 0.0
    off = row["transfer_off"]
    return {
        "slope": Interval(row["slope"], row["slope_lo"], row["slope_hi"]).within(
            1 - SLOPE, 1 + SLOPE
        ),
        "transfer": None if off is None or math.isnan(off) else bool(off <= FLAT),
        "zero": (lead.lo <= TICKS * tick and -TICKS * tick <= lead.hi) if lead.known else None,
    }


def verdict(frame: pd.DataFrame) -> Finding:
    """Of the layers' all-reduces of every point; each of the three parts must hold."""
    rows = frame[(frame["part"] == "layers") & frame["slope"].notna()]
    found = [holds(row) for _, row in rows.iterrows()]
    every = [value for one in found for value in one.values()]
    failed = [
        f"{row['mode']} tp={row['tp']} batch={row['batch']}: {name}"
        for (_, row), one in zip(rows.iterrows(), found, strict=True)
        for name, value in one.items()
        if value is False
    ]
    text = (
        f"slopes {rows['slope'].min():.3f} to {rows['slope'].max():.3f}; transfer moves by up to "
        f"{rows['transfer_off'].max():.1%}; without a delay the others lead by "
        f"{rows['lead_0_us'].min():.2f} to {rows['lead_0_us'].max():.2f} us, and the minimum over "
        f"ranks makes of that a wait of up to {rows['wait_0_us'].max():.2f} us"
    )
    if failed:
        text += f"; missed by {'; '.join(failed)}"
    return Finding(False if failed else True if all(every) else None, text)


def figure(results: Results, frame: pd.DataFrame, path: Path) -> None:
    """Waiting and transfer against the delay, step by step, a panel a point."""
    from matplotlib.figure import Figure

    steps, found = by_step(results), {p.point_id: p for p in points(results)}
    layers = steps[steps["part"] == "layers"]
    panels = list(layers.groupby("point_id", sort=False))
    drawing = Figure(figsize=(3.6 * max(1, len(panels)), 3.6), layout="constrained")
    axes = drawing.subplots(1, max(1, len(panels)), squeeze=False)[0]
    for ax, (point_id, own) in zip(axes, panels, strict=False):
        point = found[str(point_id)]
        end = float(own["skew_us"].max())
        ax.plot([0, end], [0, end], color="0.7", label="slope 1")
        ax.plot(own["skew_us"], own["wait_us"], "o", markersize=3, label="wait of the others")
        ax.plot(own["skew_us"], own["transfer_us"], "x", markersize=3, label="transfer")
        ax.set_title(f"{point.mode}, tp={point.asked['tp']} batch={point.asked['batch']}")
        ax.set_xlabel("delay before each all-reduce, us")
        ax.set_xscale("symlog", linthresh=10)
        ax.set_yscale("symlog", linthresh=10)
    axes[0].set_ylabel("us a collective")
    axes[0].legend(fontsize=8)
    drawing.savefig(path, dpi=120)


EXPERIMENT = Experiment(
    name="rank_skew",
    question="One rank is late by a known time: does all of it, and nothing else, arrive as "
    "waiting?",
    claim="the others' wait grows one to one with the delay (slope 1 within 5 %), transfer stays "
    "within 10 %, and without a delay the mean wait is 0 within its interval and a quarter tick",
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
