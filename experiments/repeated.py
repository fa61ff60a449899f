"""Points whose repeats are compared: told apart by some axes, alike in all other settings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from experiments.noise_floor import values
from harness.judging.cells import by_settings, shown_of
from harness.judging.repeats import METRICS, repeats
from harness.judging.verdict import Judgement, Repeats, judge
from harness.store import Results
from harness.tables.figures import FIGURES
from harness.tables.marker import worst_status

if TYPE_CHECKING:
    import pandas as pd


ABSENT = "no such setting"
"""In the place of its value in a run from before there was a setting: null may mean another."""
ONE_TOKEN = "no tpot: requests of one token have none"


@dataclass(frozen=True, slots=True)
class Group:
    """Points that differ in the axes alone.

    Attributes:
        asked: what they have in common; shown: names of it that tell groups apart.
        points: values of the axes, in their order -> rows of harness.judging.repeats.repeats.
    """

    asked: dict[str, Any]
    shown: tuple[str, ...]
    points: dict[tuple[Any, ...], pd.DataFrame]

    def head(self) -> dict[str, Any]:
        return {name: self.asked.get(name) for name in self.shown}


def groups(results: Results, axes: Sequence[str]) -> list[Group]:
    """The run's points, in its order, grouped by every setting but `axes`."""
    (cells,) = by_settings(repeats(results))
    found: dict[str, Group] = {}
    for asked, rows in cells.values():
        rest = {name: value for name, value in asked.items() if name not in axes}
        group = found.setdefault(json.dumps(rest, sort_keys=True), Group(rest, (), {}))
        group.points[tuple(asked.get(axis, ABSENT) for axis in axes)] = rows
    shown = shown_of([group.asked for group in found.values()])
    names = tuple(name for name in shown if name not in axes)
    return [replace(group, shown=names) for group in found.values()]


def problem(rows: pd.DataFrame | None) -> str | None:
    """Why a point cannot be compared; None if it can."""
    if rows is None:
        return "not in the run"
    status = worst_status(rows["status"])
    if status == "ok":
        return None
    reasons = rows[rows["status"] == status]["reason"].dropna()
    return f"{status}: {reasons.iloc[0]}" if len(reasons) else status


def speeds(rows: pd.DataFrame, metric: str) -> list[tuple[float, ...]]:
    """The figure of each engine's repeats, so that more is better."""
    found = values(rows, metric)
    if METRICS[metric].better == "higher":
        return found
    return [tuple(1 / value for value in engine) for engine in found]


def judged(a: pd.DataFrame, b: pd.DataFrame, metric: str) -> Judgement:
    """B against A, as `python -m harness compare` judges two runs."""
    unit = FIGURES[metric].unit
    sides = [Repeats(tuple(values(rows, metric)), unit) for rows in (a, b)]
    return judge(sides[0], sides[1], METRICS[metric].better)


def gain(found: Judgement, metric: str) -> dict[str, float | None]:
    """How many times better B is, with its 95 % interval over engines: gain, gain_lo, gain_hi. One
    engine on a side gives none: how far its repeats differ is not how far engines do."""
    ratio, lo, hi = found.ratio, found.ratio_lo, found.ratio_hi
    if any(side is not None and side.n_process == 1 for side in (found.a, found.b)):
        lo = hi = None
    if METRICS[metric].better == "lower":
        ratio, lo, hi = (None if v is None else 1 / v for v in (ratio, hi, lo))
    return {"gain": ratio, "gain_lo": lo, "gain_hi": hi}


def error_bars(value: pd.Series, lo: pd.Series, hi: pd.Series) -> list[pd.Series]:
    """Lengths below and above, as matplotlib takes them; 0 where an interval has no end."""
    return [side.fillna(0).clip(lower=0) for side in (value - lo, hi - value)]
