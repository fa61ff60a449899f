"""What each instrument costs a collective and a step, and how far their readings are apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.base import (
    Column,
    Elsewhere,
    Experiment,
    ExperimentError,
    Finding,
    between,
    framed,
    labels,
    lines,
)
from experiments.points import Point, named, points, shown
from harness.measuring.pass_plan import BACKLOG, GRAPH, HOST, PROFILER, SPAN, STEP
from harness.store import Results

if TYPE_CHECKING:
    import pandas as pd

HOW = ("instrument", "timing")
LAYERS = ("attn.o_proj", "mlp.down_proj")
NOISE = 0.05
"""Of a plain step: where plain passes differ by more, a cost within it says nothing."""
FREE = ("counts", "nvtx")
"""Instruments that nothing reads while a step runs."""
KEY = ["point_id", "pass"]
COLUMNS = {
    "mode": Column("how the forward ran"),
    "method": Column("what is attached in the pass; collectives by what times them"),
    "pass": Column("plain has nothing attached"),
    "host_us": Column("a decode step on rank 0's host, plan to collect, median", ".1f"),
    "cost_us": Column("host_us above that of the same point's plain pass", ".1f"),
    "cost": Column("of the plain step", ".1%"),
    "noise_us": Column(
        "how far the plain passes of these points differ among themselves, largest - smallest "
        "median: a cost below it is none",
        ".1f",
    ),
    "device_us": Column(
        "the step by its own stamps or events (CPU: forward and sampling by the host's clock), the "
        "rank that waits least",
        ".1f",
    ),
    "device_cost_us": Column(
        "device_us above that of the step pass, stamps at its ends (CPU: of the plain pass)", ".1f"
    ),
    "device_cost": Column("of the clean step", ".1%"),
    "cost_each_us": Column(
        "device_cost_us / collectives of a step; cost_us where the point has no clean device_us",
        ".2f",
    ),
    "reads_us": Column(
        "what the method says of one all-reduce of a layer, minimum over ranks, median; spans hold "
        "the host's launch gaps",
        ".2f",
    ),
    "against_cupti_us": Column("reads_us less what CUPTI says of the kernel", ".2f"),
    "reason": Column("why there is no cost"),
}  # fmt: skip


def summary(results: Results) -> pd.DataFrame:
    """A row a point and pass, with COLUMNS after the settings that vary.

    Raises:
        ExperimentError: no pass with an instrument.
    """
    found = points(results)
    names = tuple(name for name in shown(found) if name not in HOW)
    steps, reads, counts = _steps(results), _readings(results), _collectives(results)
    cells: dict[str, list[Point]] = {}
    for point in found:
        rest = {name: value for name, value in point.asked.items() if name not in HOW}
        cells.setdefault(json.dumps(rest, sort_keys=True), []).append(point)
    rows = [row for cell in cells.values() for row in _cell(cell, names, steps, reads, counts)]
    frame = framed(rows, names, COLUMNS)
    if not frame["cost_us"].notna().any():
        raise ExperimentError(
            "no pass with an instrument; measure them by "
            "python -m harness +experiment=instrument_overhead"
        )
    return frame


def method(point: Point, pass_name: str) -> str:
    """What a pass of the point attaches."""
    asked = [name for name in str(point.everything["instrument"]).split(",") if name]
    timing = str(point.everything["timing"])
    if pass_name == STEP:
        return "stamps at the step's ends"
    if pass_name == PROFILER:
        return "profiler"
    if pass_name == SPAN:
        return timing
    alone = [name for name in ("counts", "nvtx") if name in asked]
    timed = [timing] if "collectives" in asked else []
    return "+".join([*alone, *timed])


def _steps(results: Results) -> pd.DataFrame:
    """Medians of decode steps by point and pass: host_us of rank 0, device_us of the rank that
    waits least."""
    rows = results.table(
        "steps", [*KEY, "process", "repeat", "step", "phase", "host_us", "device_us"]
    )
    rows = rows[rows["phase"] == "decode"]
    least = rows.groupby([*KEY, "process", "repeat", "step"])[["host_us", "device_us"]].min()
    return least.groupby(KEY, sort=False).median()


def _readings(results: Results) -> pd.Series:
    """us by point and pass: median over the layers' all-reduces of decode steps."""
    rows = results.table(
        "collectives",
        [*KEY, "process", "step", "ordinal", "phase", "site", "transfer_us", "span_us"],
    )
    rows = rows[(rows["phase"] == "decode") & rows["site"].isin(LAYERS)]
    one = rows.groupby([*KEY, "process", "step", "ordinal"])[["transfer_us", "span_us"]].min()
    found = one["transfer_us"].fillna(one["span_us"]).groupby(KEY).median()
    return found.dropna()


def _collectives(results: Results) -> dict[str, float]:
    """Collectives of a decode step, by point that timed some."""
    rows = results.table("collectives", [*KEY, "process", "rank", "step", "phase"])
    rows = rows[(rows["phase"] == "decode") & (rows["rank"] == 0)]
    sizes = rows.groupby([*KEY, "process", "step"]).size().groupby("point_id").median()
    return {str(k): float(v) for k, v in sizes.items()}


def _cell(
    cell: list[Point],
    names: tuple[str, ...],
    steps: pd.DataFrame,
    reads: pd.Series,
    counts: dict[str, float],
) -> list[dict[str, Any]]:
    """The rows of points that differ in their instruments alone."""
    own = {
        p.point_id: steps.loc[[p.point_id]].droplevel(0) for p in cell if p.point_id in steps.index
    }
    plain = {k: float(v.loc["plain", "host_us"]) for k, v in own.items() if "plain" in v.index}
    noise = max(plain.values()) - min(plain.values()) if len(plain) > 1 else None
    each = max((counts[p.point_id] for p in cell if p.point_id in counts), default=None)
    cupti = [reads[(p.point_id, PROFILER)] for p in cell if (p.point_id, PROFILER) in reads.index]
    rows = []
    for point in cell:
        head = named(point.asked, names) | dict.fromkeys(COLUMNS) | {"mode": point.mode}
        if point.failure is not None or point.point_id not in plain:
            why = point.failure or "no decode step in its plain pass"
            rows.append(head | {"method": method(point, HOST), "reason": why})
            continue
        passes = own[point.point_id]
        clean = passes["device_us"].get(STEP, passes["device_us"].get("plain"))
        for name, step in passes.iterrows():
            if name in ("plain", "skew"):
                continue
            row = head | {"method": method(point, str(name)), "pass": name, "noise_us": noise}
            row |= _costs(str(name), step, plain[point.point_id], clean, each)
            if (point.point_id, name) in reads.index:
                row["reads_us"] = float(reads[(point.point_id, name)])
                row["against_cupti_us"] = row["reads_us"] - float(cupti[0]) if cupti else None
            rows.append(row)
    return rows


def _costs(
    name: str, step: pd.Series, plain: float, clean: float | None, each: float | None
) -> dict[str, Any]:
    import pandas as pd

    row: dict[str, Any] = {"host_us": float(step["host_us"])}
    if name == BACKLOG:
        return {"reason": "its steps hold the spins; the pass span tells what the readings cost"}
    row["cost_us"] = row["host_us"] - plain
    row["cost"] = row["cost_us"] / plain
    charged = row["cost_us"]
    if clean is not None and not pd.isna(clean):
        charged = None
        if not pd.isna(step["device_us"]):
            row["device_us"] = float(step["device_us"])
            row["device_cost_us"] = row["device_us"] - float(clean)
            row["device_cost"] = row["device_cost_us"] / float(clean)
            charged = row["device_cost_us"]
    if each and charged is not None and name != STEP:
        row["cost_each_us"] = charged / each
    return row


def verdict(frame: pd.DataFrame) -> Finding:
    """Counts and NVTX within the noise; in graphs, events dearer than stamps."""
    import pandas as pd

    free = frame[frame["method"].isin(FREE) & frame["cost_us"].notna() & frame["noise_us"].notna()]
    within = (free["cost_us"] <= free["noise_us"]).astype(bool)
    noise = free["noise_us"] / (free["host_us"] - free["cost_us"])  # of the plain step
    graphs = frame[(frame["pass"] == GRAPH) & frame["device_cost"].notna()]
    stamps, events = (
        graphs[graphs["method"] == how]["device_cost"] for how in ("stamps", "events")
    )
    text = (
        f"{int(within.sum())} of {len(free)} costs of counts and NVTX ranges are within the noise, "
        f"which is {between(noise, '.1%')} of a step"
        if len(free)
        else "counts and NVTX ranges were not measured beside another plain pass"
    )
    parts: list[bool | None] = []
    if not within.all():
        parts.append(False)
    elif len(free) and (noise <= NOISE).all():
        parts.append(True)
    else:
        parts.append(None)
        text += f": above {NOISE:.0%} it hides what is looked for" if len(free) else ""
    if len(stamps) and len(events):
        parts.append(bool(events.min() > stamps.max()))
        text += (
            f"; in graphs stamps add {between(stamps, '.1%')} to a step, events "
            f"{between(events, '.1%')}"
        )
    else:
        parts.append(None)
        text += "; stamps and events were not compared in graphs"
    far = frame[frame["against_cupti_us"].notna() & (frame["pass"] != SPAN)]
    far = far[far["method"] != "profiler"]
    if len(far) and not pd.isna(far["against_cupti_us"]).all():
        text += f"; readings lie {between(far['against_cupti_us'], '+.1f')} us from CUPTI's"
    return Finding(False if False in parts else True if all(parts) else None, text)


def figure(results: Results, frame: pd.DataFrame, path: Path) -> None:
    """Left the cost of a step with the noise as a band, right what each method reads."""
    drawn = frame[frame["cost_us"].notna() | frame["reads_us"].notna()]
    methods = (f" {row['method']} ({row['pass']})" for _, row in drawn.iterrows())
    names = [a + b for a, b in zip(labels(drawn, COLUMNS), methods, strict=True)]
    places = range(len(drawn))
    drawing, (costs, reads) = lines(names, panels=2)
    costs.barh(places, drawn["noise_us"].fillna(0.0), color="0.85", label="noise")
    costs.barh(places, drawn["cost_us"].fillna(0.0), height=0.4, label="cost")
    costs.set_xlabel("us a step, host")
    costs.legend(fontsize=7)
    reads.barh(places, drawn["reads_us"].fillna(0.0), height=0.4)
    reads.set_xlabel("us that it says of an all-reduce")
    drawing.savefig(path, dpi=120)


EXPERIMENT = Experiment(
    name="instrument_overhead",
    question="What does each instrument cost a collective and a step, and do their readings agree?",
    claim="counts and NVTX ranges cost no more than clean measurements differ; in a graph event "
    "nodes cost more than timestamp kernels",
    source="NVIDIA/NVTX#3: ranges are free where no tool is attached; the second is ours",
    columns=COLUMNS,
    summary=summary,
    figure=figure,
    verdict=verdict,
    elsewhere=(
        Elsewhere(
            "ranges that break the compiled graph cost 19 % (3.02 against 2.54)", "DeepSpeed#5697"
        ),
    ),
)
