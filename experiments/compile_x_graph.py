"""Compiling and CUDA graphs, each alone and both: do their gains multiply?"""

from __future__ import annotations

import math
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
)
from experiments.intervals import Interval, product
from experiments.repeated import ONE_TOKEN, Group, groups, problem, speeds
from harness.judging.cells import DEFAULT
from harness.judging.verdict import MIN_REPEATS
from harness.store import Results

if TYPE_CHECKING:
    import pandas as pd

AXES = ("compile", "enforce_eager")
DECIDES = "tpot"
OFF = "off"
COLUMNS = {
    "compiled": Column("compile of the points that are compiled"),
    "metric": Column("the figure; every factor is how many times better it gets"),
    "engines": Column("fresh engines of the point that has fewest"),
    "by_compile": Column("compiled against eager, both launched", ".3f"),
    "by_compile_lo": Column("95 % interval, as that of the interaction", ".3f"),
    "by_compile_hi": Column("upper end", ".3f"),
    "by_graph": Column("graphs against eager, neither compiled", ".3f"),
    "by_graph_lo": Column("lower end", ".3f"),
    "by_graph_hi": Column("upper end", ".3f"),
    "by_both": Column("compiled graphs against eager", ".3f"),
    "by_both_lo": Column("lower end", ".3f"),
    "by_both_hi": Column("upper end", ".3f"),
    "interaction": Column("by_both / (by_compile x by_graph); 1 where the gains multiply", ".3f"),
    "interaction_lo": Column(
        "95 % interval: contrast of the engines' mean logarithms in four cells, Welch and "
        "Satterthwaite's degrees of freedom",
        ".3f",
    ),
    "interaction_hi": Column("upper end", ".3f"),
    "adds": Column("what compiling adds to graphs: by_both / by_graph", ".3f"),
    "reason": Column("why there is no figure, or no interval"),
}


def summary(results: Results) -> pd.DataFrame:
    """A row for each four points, way of compiling and metric, with COLUMNS after the settings that
    vary.

    Raises:
        ExperimentError: no four points have an interaction of DECIDES.
    """
    found = groups(results, AXES)
    rows = [row for group in found for row in _rows(group)]
    if not any(row["metric"] == DECIDES and row["interaction"] is not None for row in rows):
        reasons = dict.fromkeys(str(r["reason"]) for r in rows if r["interaction"] is None)
        why = "compile is off" if not rows else "; ".join(reasons) or ONE_TOKEN
        raise ExperimentError(
            f"no point was measured in all four ways ({why}); on a GPU run "
            "python -m harness +experiment=compile_x_graph"
        )
    return framed(rows, found[0].shown, COLUMNS)


def _rows(group: Group) -> list[dict[str, Any]]:
    ways = dict.fromkeys(how for how, _ in group.points if how != OFF)
    return [row for how in ways for row in _of_way(group, how)]


def _of_way(group: Group, how: str) -> list[dict[str, Any]]:
    head = group.head() | dict.fromkeys(COLUMNS) | {"compiled": how}
    keys = [(OFF, True), (how, True), (OFF, False), (how, False)]
    names = ("eager", "compiled", "graph", "compiled graph")
    four = [group.points.get(key) for key in keys]
    wrong = [f"{n}: {w}" for n, p in zip(names, four, strict=True) if (w := problem(p))]
    if wrong:
        return [head | {"reason": "; ".join(wrong)}]
    rows = []
    for metric in DEFAULT:
        cells = [speeds(point, metric) for point in four if point is not None]
        if not all(cells):
            continue
        rows.append(head | {"metric": metric} | effects(*cells))
    return rows or [head | {"reason": "none of the figures was measured"}]


Cell = list[tuple[float, ...]]


def effects(eager: Cell, compiled: Cell, graph: Cell, both: Cell) -> dict[str, Any]:
    """The factors of one metric, from the speeds of each engine's repeats in the four cells."""
    cells = (eager, compiled, graph, both)
    found = {
        "by_compile": product([(1, compiled), (-1, eager)]),
        "by_graph": product([(1, graph), (-1, eager)]),
        "by_both": product([(1, both), (-1, eager)]),
        "interaction": product([(1, both), (1, eager), (-1, compiled), (-1, graph)]),
    }
    row: dict[str, Any] = {"engines": min(map(len, cells))}
    fewest = min(sum(map(len, cell)) for cell in cells)
    enough = fewest >= MIN_REPEATS
    for name, interval in found.items():
        row[name] = interval.value
        known = interval.known and enough
        row[f"{name}_lo"], row[f"{name}_hi"] = (interval.lo, interval.hi) if known else (None, None)
    row["adds"] = row["by_both"] / row["by_graph"]
    if row["engines"] < 2:
        row["reason"] = "one engine: how far engines differ is not known (measure.n_process=5)"
    elif not enough:
        row["reason"] = f"{fewest} repeats of a point; an interval needs {MIN_REPEATS}"
    return row


def verdict(frame: pd.DataFrame) -> Finding:
    """The claim holds where the interaction's interval lies below 1 in every row of DECIDES."""
    rows = frame[(frame["metric"] == DECIDES) & frame["interaction"].notna()]
    below = [
        Interval(r["interaction"], r["interaction_lo"], r["interaction_hi"]).within(0, 1)
        for _, r in rows.iterrows()
    ]
    text = (
        f"of {DECIDES}, compiling alone gains {between(rows['by_compile'], '.2f')}, graphs alone "
        f"{between(rows['by_graph'], '.2f')}, both {between(rows['by_both'], '.2f')}; the "
        f"interaction is {between(rows['interaction'], '.2f')}, below 1 in "
        f"{sum(b is True for b in below)} of {len(below)} cells; to graphs compiling adds "
        f"{between(rows['adds'], '.2f')}"
    )
    if None in below:
        text += f"; of {below.count(None)} no interval tells"
    holds = False if False in below else True if below and all(below) else None
    return Finding(holds, text)


def figure(results: Results, frame: pd.DataFrame, path: Path) -> None:
    """A square a row of DECIDES: how many times better than eager each of the four is."""
    from matplotlib.figure import Figure

    rows = frame[(frame["metric"] == DECIDES) & frame["interaction"].notna()]
    columns = min(4, len(rows))
    lines = math.ceil(len(rows) / columns)
    drawing = Figure(figsize=(3 * columns, 3 * lines), layout="constrained")
    axes = drawing.subplots(lines, columns, squeeze=False)
    top = float(rows[["by_compile", "by_graph", "by_both"]].max().max())
    for ax in axes.ravel()[len(rows) :]:
        ax.set_visible(False)
    names = labels(rows, COLUMNS)
    darkest = min(1.0, float(rows[["by_compile", "by_graph", "by_both"]].min().min()))
    for ax, name, (_, row) in zip(axes.ravel(), names, rows.iterrows(), strict=False):
        square = [[1.0, row["by_graph"]], [row["by_compile"], row["by_both"]]]
        ax.imshow(square, vmin=darkest, vmax=top, cmap="viridis")
        for y in (0, 1):
            for x in (0, 1):
                color = "white" if square[y][x] < (darkest + top) / 2 else "black"
                ax.text(x, y, f"{square[y][x]:.2f}", ha="center", va="center", color=color)
        ax.set_xticks([0, 1], ["launched", "graph"])
        ax.set_yticks([0, 1], [OFF, row["compiled"]])
        ax.set_title(f"{name}\ninteraction {row['interaction']:.2f}", fontsize=9)
    drawing.savefig(path, dpi=120)


EXPERIMENT = Experiment(
    name="compile_x_graph",
    question="What do compiling and CUDA graphs gain, each alone and both, and do the gains "
    "multiply?",
    claim="both gain less than the product of what each gains: they attack the same bottleneck",
    source="sglang-omni#579",
    columns=COLUMNS,
    summary=summary,
    figure=figure,
    verdict=verdict,
    elsewhere=(
        Elsewhere(
            "199.1 +- 4.7 to 51.8 +- 1.4 ms a step with both (3.84 times)", "torchtitan#2373"
        ),
        Elsewhere(
            "eager makes some 1,720 tok/s in the same table of four",
            "torchtitan#3685, Qwen3-1.7B TP=4",
        ),
    ),
)
