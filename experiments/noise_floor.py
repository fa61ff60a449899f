"""A/A: how far two measurements of one thing differ, in an engine and across fresh ones."""

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
from harness.judging.cells import DEFAULT, by_settings, shown_of
from harness.judging.repeats import METRICS, repeats
from harness.judging.variance import Components, one_way, smallest_detectable
from harness.judging.verdict import Repeats, Verdict, engine_floor, judge
from harness.store import Results
from harness.tables.figures import FIGURES

if TYPE_CHECKING:
    import pandas as pd

MIN_ENGINES = 8
"""Of a point: four a side, the fewest whose A/A comparison mostly ends as SAME."""
MIN_REPEATS = 6
"""Of an engine."""
COLUMNS = {
    "metric": Column("the figure"),
    "centre": Column("geometric mean of the engines' medians", ".4g"),
    "unit": Column("of centre"),
    "engines": Column("fresh engines, started in turns"),
    "repeats": Column("in all engines"),
    "within": Column("relative standard deviation of the repeats of one engine", ".2%"),
    "between": Column(
        "relative standard deviation that engines add to it, by one-way random-effects ANOVA; 0 "
        "where they differ no more than their repeats explain; with one repeat an engine all of "
        "their difference",
        ".2%",
    ),
    "icc": Column("intraclass correlation: the engines' share of a repeat's variance", ".2f"),
    "detect_within": Column("smallest detectable difference of two repeats in one engine", ".1%"),
    "floor": Column(
        "smallest detectable difference of two fresh engines, each with the median of its repeats: "
        "the floor of a verdict; that of A' against A knows each half by itself",
        ".1%",
    ),
    "six_runs": Column("largest / smallest - 1 of the first repeats of six engines", ".1%"),
    "ratio": Column("A' / A, where A are engines 0, 3, 4, 7, 8, ..., A' the others", ".3f"),
    "verdict": Column("of A' against A"),
    "reason": Column("of the verdict, B being A'; or why there is none"),
}  # fmt: skip


def summary(results: Results) -> pd.DataFrame:
    """A row a point and metric, with COLUMNS after the settings that vary.

    Raises:
        ExperimentError: no point has as many engines and repeats as an answer needs.
    """
    frame = repeats(results)
    (points,) = by_settings(frame)
    shown = shown_of([asked for asked, _ in points.values()])
    rows = [
        {name: asked[name] for name in shown} | found
        for asked, point in points.values()
        for found in _rows(point)
    ]
    if all(row["floor"] is None for row in rows):
        raise ExperimentError(
            f"no point with at least {MIN_ENGINES} engines of {MIN_REPEATS} repeats "
            f"({'; '.join(dict.fromkeys(row['reason'] for row in rows))}); measure one by "
            "python -m harness +experiment=noise_floor"
        )
    return framed(rows, shown, COLUMNS)


def _rows(point: pd.DataFrame) -> list[dict[str, Any]]:
    """A row a metric that the point has; one that says why, if it cannot be used."""
    engines, least = point["process"].nunique(), int(point.groupby("process").size().min())
    bad = point[point["status"] != "ok"]
    nothing: dict[str, Any] = dict.fromkeys(COLUMNS)
    if len(bad):
        said = f"{bad['status'].iloc[0]}: {bad['reason'].iloc[0]}"
        return [nothing | {"engines": engines, "reason": said}]
    if engines < MIN_ENGINES or least < MIN_REPEATS:
        said = f"{engines} engines, of which one has {least} repeats"
        return [nothing | {"engines": engines, "repeats": len(point), "reason": said}]
    found = [nothing | _row(point, metric) for metric in DEFAULT if point[metric].notna().any()]
    return found or [nothing | {"reason": "none of the figures was measured"}]


def _row(point: pd.DataFrame, metric: str) -> dict[str, Any]:
    engines = values(point, metric)
    medians = np.log([np.median(engine) for engine in engines])
    parts = components(engines)
    unit = FIGURES[metric].unit
    a, b = (Repeats(half, unit) for half in halved(engines))
    judged = judge(a, b, METRICS[metric].better)
    firsts = [engine[0] for engine in engines[:6]]
    return {
        "metric": metric,
        "centre": math.exp(float(medians.mean())),
        "unit": unit,
        "engines": len(engines),
        "repeats": sum(map(len, engines)),
        "within": None if parts is None else math.expm1(parts.within_std),
        "between": math.expm1(medians.std(ddof=1) if parts is None else parts.between_std),
        "icc": None if parts is None else parts.icc,
        "detect_within": None if parts is None else _detectable(parts),
        "floor": engine_floor([engines]),
        "six_runs": max(firsts) / min(firsts) - 1,
        "ratio": judged.ratio,
        "verdict": str(judged.verdict),
        "reason": judged.reason,
    }


def values(point: pd.DataFrame, metric: str) -> list[tuple[float, ...]]:
    """The figures of each engine, in the order of the engines and repeats."""
    groups = point[point[metric].notna()].groupby("process")[metric]
    return [tuple(map(float, group)) for _, group in groups]


def components(engines: list[tuple[float, ...]]) -> Components | None:
    """Variance components of the logarithms; None with one repeat an engine (step_us of a GPU)."""
    if all(len(engine) == 1 for engine in engines):
        return None
    return one_way([np.log(engine).tolist() for engine in engines])


def halved(engines: list[tuple[float, ...]]) -> list[tuple[tuple[float, ...], ...]]:
    """[A, A']: of four engines the outer two and the inner two, so that a steady drift of the
    machine moves both halves alike."""
    outer = [place % 4 in (0, 3) for place in range(len(engines))]
    return [
        tuple(e for e, mine in zip(engines, outer, strict=True) if mine == side)
        for side in (True, False)
    ]


def _detectable(parts: Components) -> float:
    df = parts.repeats - parts.engines
    return math.expm1(smallest_detectable(parts.within_std, df))


def figure(results: Results, frame: pd.DataFrame, path: Path) -> None:
    """Every repeat by engine, as deviation from the centre; the band is the floor."""
    from matplotlib.figure import Figure

    (points,) = by_settings(repeats(results))
    drawing = Figure(figsize=(4.5 * len(DEFAULT), 1 + 2.2 * len(points)), layout="constrained")
    axes = drawing.subplots(len(points), len(DEFAULT), squeeze=False, sharex=True)
    cells = frame.drop_duplicates([name for name in frame if name not in COLUMNS])
    for line, name, (_, point) in zip(axes, labels(cells, COLUMNS), points.values(), strict=True):
        of_metric = {row["metric"]: row for row in _rows(point)}
        for ax, metric in zip(line, DEFAULT, strict=True):
            if metric in of_metric:
                _strip(ax, values(point, metric), of_metric[metric])
                ax.set_title(f"{metric}, {name}", fontsize=9)
            else:
                ax.set_visible(False)
    for ax in axes[-1]:
        ax.set_xlabel("fresh engine, in order of time")
    drawing.savefig(path, dpi=120)


def _strip(ax: Any, engines: list[tuple[float, ...]], row: dict[str, Any]) -> None:
    ax.axhspan((1 / (1 + row["floor"]) - 1) * 100, row["floor"] * 100, color="0.9")
    ax.axhline(0, color="0.5", linewidth=0.8)
    for place, engine in enumerate(engines):
        percent = (np.array(engine) / row["centre"] - 1) * 100
        ax.plot([place] * len(engine), percent, "o", markersize=3, alpha=0.6, color="C0")
        ax.plot([place - 0.3, place + 0.3], [np.median(percent)] * 2, color="C1")
    ax.set_ylabel("% of the centre")


def verdict(frame: pd.DataFrame) -> Finding:
    """The claim holds where every comparison is SAME, fails where one is FASTER or SLOWER."""
    judged = frame[frame["floor"].notna()]
    counts = judged["verdict"].value_counts()
    alarms = int(counts.get(str(Verdict.FASTER), 0) + counts.get(str(Verdict.SLOWER), 0))
    same = int(counts.get(str(Verdict.SAME), 0))
    text = (
        f"{same} of {len(judged)} A/A comparisons are SAME, {alarms} false alarms; two fresh "
        f"engines differ by up to {between(judged['floor'], '.1%')}, "
        "depending on point and figure"
    )
    if (left := len(judged) - same - alarms) > 0:
        text += f"; {left} are AMBIGUOUS"
    return Finding(False if alarms else True if same == len(judged) else None, text)


EXPERIMENT = Experiment(
    name="noise_floor",
    question="How far do two measurements of the same thing differ, in one engine and across fresh "
    "ones?",
    claim="the same thing measured twice compares as SAME",
    source="NVIDIA nvbench, nvbench-compare-robust: no verdict without a gap between intervals",
    columns=COLUMNS,
    summary=summary,
    figure=figure,
    verdict=verdict,
    elsewhere=(
        Elsewhere(
            "six identical runs spread over 6.9 %, with another engine 6.5 %",
            "github.com/0xBakeer/qwen38-flash-next-spark/issues/6, DGX Spark, llama.cpp and vLLM",
        ),
        Elsewhere(
            "paired runs of one configuration differ by up to 21.9 % (prefill) and 12.3 % (decode)",
            "github.com/guelfoweb/orbit/pull/295, six loads of a model in turns",
        ),
    ),
)
