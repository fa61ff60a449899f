"""What each lever gains: overlap, prompt graphs, attention, sums, fused kernels, products."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.base import (
    Column,
    Experiment,
    ExperimentError,
    Finding,
    between,
    framed,
    labels,
    lines,
)
from experiments.repeated import Group, gain, groups, judged, problem
from harness.judging.cells import DEFAULT
from harness.judging.verdict import Verdict
from harness.settings.config import as_written
from harness.store import Results
from harness.tables.figures import FIGURES

if TYPE_CHECKING:
    import pandas as pd

LEVERS: dict[str, tuple[Any, ...]] = {
    "engine.overlap": (False, True),
    "engine.graph_prompt_tokens": (0, None),
    "attention": ("sdpa", "flash2", "triton", "flash2_triton", "flash4"),
    "comm": ("nccl", "symm_mem", "symm_fused"),
    "engine.fused": ("none", "layers", "store"),
    "engine.linear": ("torch", "triton"),
}
"""Settings and their values, each measured against those before it."""
TAKEN = {"engine.overlap": True, "engine.graph_prompt_tokens": None,
         "attention": "flash2_triton", "comm": "symm_fused",
         "engine.fused": "store", "engine.linear": "triton"}  # fmt: skip
"""What the engine takes on a GPU when it is not told (engine/resolve.py)."""
JUDGED = (*DEFAULT, "step_host_us", "ttft")
DECIDES = ("tpot", "ttft")
"""The metrics of the claim, with what the host adds to the device's step: the second where requests
have one token (workload=prefill)."""
COLUMNS = {
    "lever": Column("the setting that differs; all others are equal"),
    "before": Column("its value on one side, as a command line has it"),
    "after": Column("and on the other"),
    "beside": Column("other levers that the run pulls, as both sides have them"),
    "metric": Column("the figure"),
    "value_before": Column("its centre over fresh engines", ".4g"),
    "value_after": Column("the same on the other side", ".4g"),
    "unit": Column("of both"),
    "gain": Column("how many times better after than before", ".3f"),
    "gain_lo": Column("95 % interval of the gain, Welch over engines", ".3f"),
    "gain_hi": Column("upper end", ".3f"),
    "verdict": Column("of after against before, see docs/verdicts.md"),
    "reason": Column("of the verdict, A before and B after; or why there is none"),
}


def summary(results: Results) -> pd.DataFrame:
    """A row a pair of points that differ in one lever, and metric; COLUMNS after the settings that
    vary.

    Raises:
        ExperimentError: no pair has a gain.
    """
    found = groups(results, tuple(LEVERS))
    rows = [row for group in found for row in _rows(group)]
    if not any(row["gain"] is not None for row in rows):
        why = "; ".join(dict.fromkeys(str(row["reason"]) for row in rows)) or "it has no such pair"
        raise ExperimentError(
            f"no two points that differ in one lever were measured ({why}); run "
            "python -m harness +experiment=levers"
        )
    return framed(rows, found[0].shown, COLUMNS)


def _rows(group: Group) -> Iterator[dict[str, Any]]:
    for lever, before, after in _pairs(group):
        place = list(LEVERS).index(lever)
        head = group.head() | dict.fromkeys(COLUMNS)
        head |= {"lever": lever, "beside": _beside(group, before, lever)}
        # As text: null and 0 in one column would become NaN and 0.0.
        head |= {"before": as_written(before[place]), "after": as_written(after[place])}
        a, b = group.points[before], group.points[after]
        sides = (head["before"], a), (head["after"], b)
        wrong = [f"{value}: {w}" for value, side in sides if (w := problem(side))]
        if wrong:
            yield head | {"reason": "; ".join(wrong)}
            continue
        for metric in JUDGED:
            if a[metric].isna().all() and b[metric].isna().all():
                continue
            one = judged(a, b, metric)
            yield head | {
                "metric": metric,
                "value_before": one.a.value if one.a else None,
                "value_after": one.b.value if one.b else None,
                "unit": FIGURES[metric].unit,
                **gain(one, metric),
                "verdict": str(one.verdict),
                "reason": one.reason,
            }


def _pairs(group: Group) -> list[tuple[str, tuple[Any, ...], tuple[Any, ...]]]:
    """(lever, point before, point after) of all points that differ in it alone, by lever."""
    found = []
    for points in combinations(group.points, 2):
        differing = [i for i, (a, b) in enumerate(zip(*points, strict=True)) if a != b]
        lever, values = list(LEVERS.items())[differing[0]]
        known = all(point[differing[0]] in values for point in points)
        if len(differing) == 1 and known:
            before, after = sorted(points, key=lambda p: values.index(p[differing[0]]))
            found.append((lever, before, after))
    return sorted(found, key=lambda pair: list(LEVERS).index(pair[0]))


def _beside(group: Group, point: tuple[Any, ...], lever: str) -> str:
    """The levers but one that have several values in the group, as `point` has them."""
    values = zip(LEVERS, zip(*group.points, strict=True), point, strict=True)
    return " ".join(
        f"{name}={as_written(own)}"
        for name, of_all, own in values
        if name != lever and len(set(of_all)) > 1
    )


def cells(frame: pd.DataFrame) -> pd.DataFrame:
    """A row a pair: that of the first of DECIDES that has a gain."""
    rows = frame[frame["metric"].isin(DECIDES) & frame["gain"].notna()]
    rows = rows.sort_values("metric", key=lambda of: of.map(DECIDES.index), kind="stable")
    pair = list(frame.columns[: list(frame.columns).index("metric")])
    return rows[~rows[pair].astype(str).duplicated()].sort_index()


def verdict(frame: pd.DataFrame) -> Finding:
    """Holds if no value that is not taken is FASTER than the one that is, at the same others."""
    rows, beaten, open_ones = cells(frame), 0, 0
    said = []
    for (lever, before, after), own in rows.groupby(["lever", "before", "after"], sort=False):
        counts = own["verdict"].value_counts()
        said.append(
            f"{lever} {before} to {after}: "
            f"{between(own['gain'], '.2f')} times better, FASTER in {counts.get('FASTER', 0)} "
            f"and SLOWER in {counts.get('SLOWER', 0)} of {len(own)} cells"
        )
        taken = as_written(TAKEN[str(lever)])
        if taken not in (before, after):
            continue
        better = Verdict.SLOWER if after == taken else Verdict.FASTER
        beaten += int(counts.get(str(better), 0))
        open_ones += int(counts.get(str(Verdict.AMBIGUOUS), 0))
    text = "; ".join(said)
    if beaten:
        return Finding(False, f"{beaten} cells are faster with another value; {text}")
    if open_ones:
        text = f"with what is taken, AMBIGUOUS cells: {open_ones}; {text}"
    return Finding(None if open_ones or not said else True, text)


def figure(results: Results, frame: pd.DataFrame, path: Path) -> None:
    """Gains of DECIDES with their intervals, a line a cell, levers apart by colour."""
    rows = cells(frame)
    colours = {lever: f"C{i}" for i, lever in enumerate(LEVERS)}
    drawing, (ax,) = lines(
        [
            f"{row['lever']} {row['before']} to {row['after']} {told}"
            for told, row in zip(
                labels(rows, COLUMNS, ("beside",)), rows.to_dict("records"), strict=True
            )
        ]
    )
    for place, row in enumerate(rows.to_dict("records")):
        low, high = row["gain"] - row["gain_lo"], row["gain_hi"] - row["gain"]
        bars = None if low != low or high != high else [[low], [high]]
        ax.errorbar(row["gain"], place, xerr=bars, fmt="o", capsize=3, color=colours[row["lever"]])
    ax.axvline(1, color="0.5", linewidth=0.8)
    ax.set_xlabel(f"times better ({' or '.join(rows['metric'].unique())})")
    drawing.savefig(path, dpi=120)


EXPERIMENT = Experiment(
    name="levers",
    question="What does each lever gain by itself, and which gain nothing?",
    claim="what the engine takes on a GPU when it is not told is nowhere slower than another value",
    source="engine/resolve.py and engine/config.py of this repository",
    columns=COLUMNS,
    summary=summary,
    figure=figure,
    verdict=verdict,
)
