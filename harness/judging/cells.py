"""Two runs joined cell by cell: points asked for alike, and a verdict on each figure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from harness.judging.differences import disturbed, effective, of_one_side
from harness.judging.repeats import METRICS
from harness.judging.verdict import Judgement, Repeats, Verdict, judge
from harness.measuring.pass_plan import NSYS
from harness.settings.config import as_written
from harness.tables.figures import FIGURES
from harness.tables.marker import worst_status
from harness.tables.report import ALWAYS, AXES, settings

if TYPE_CHECKING:
    import pandas as pd

DEFAULT = ("output_tok_s", "tpot", "step_us")
HOW = ("measure", "instrument", "timing")
"""Settings, and their sections, that say how a point is measured and not what; two runs may differ
in one of them, unless a run sweeps it."""
LIMIT = "engine.max_num_seqs"
CLOCKS = 0.02
"""Median SM clocks of the two sides may differ by this much."""


class Refused(ValueError):
    """Two runs that cannot be compared; the text says why and what to do."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One figure of one point: its settings, B judged against A, and what the engines of B ran
    otherwise (differences.effective)."""

    settings: dict[str, Any]
    metric: str
    judgement: Judgement
    point_a: str
    point_b: str
    effective: tuple[str, ...]

    def row(self, shown: Sequence[str]) -> dict[str, Any]:
        """The settings `shown`, then every number flat: a, b (centres), a_lo ... b_n_process; what
        differs in effect is one text, empty where nothing does."""
        found = self.judgement
        row = {name: self.settings.get(name) for name in shown}
        row |= {"metric": self.metric, "unit": FIGURES[self.metric].unit}
        for side, centre in (("a", found.a), ("b", found.b)):
            row[side] = None if centre is None else centre.value
            for name in ("lo", "hi", "n", "n_process"):
                row[f"{side}_{name}"] = None if centre is None else getattr(centre, name)
        row |= {name: getattr(found, name) for name in ("ratio", "ratio_lo", "ratio_hi", "floor")}
        row |= {"verdict": str(found.verdict), "reason": found.reason}
        row["effective"] = "; ".join(self.effective)
        return row | {"point_a": self.point_a, "point_b": self.point_b}


@dataclass(frozen=True, slots=True)
class Comparison:
    """B against A.

    Attributes:
        a, b: what each side is: runs, machine, commits, versions.
        shown: settings that tell the cells apart, and those that every table has.
        cells: in the order of A's points, then of the metrics.
        only_a, only_b: points of one side alone, as text.
        notes: what else a reader must know.
    """

    a: dict[str, Any]
    b: dict[str, Any]
    shown: tuple[str, ...]
    cells: tuple[Cell, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    notes: tuple[str, ...]

    def counts(self) -> dict[str, int]:
        """Cells by verdict, every verdict named."""
        found = [cell.judgement.verdict for cell in self.cells]
        return {str(verdict): found.count(verdict) for verdict in Verdict}


def compare(
    a: pd.DataFrame,
    b: pd.DataFrame,
    metrics: Sequence[str] = DEFAULT,
    *,
    across_machines: bool = False,
    floor: float | None = None,
) -> Comparison:
    """Judges B against A, both as of `repeats.read`.

    Cells are joined by every setting of the requested configuration but those of HOW. A figure that
    neither side has is left out, and so are cells that neither side measured; both are in `notes`.

    Raises:
        Refused: a metric that repeats do not have, the same run twice, other machines, or no cell
            that both sides have.
    """
    unknown = [name for name in metrics if name not in METRICS]
    if unknown:
        raise Refused(f"metric {unknown[0]}: choose among {', '.join(METRICS)}")
    if set(a["run_id"]) & set(b["run_id"]):
        raise Refused(f"A and B are the same run: {', '.join(sorted(set(a['run_id'])))}")
    head = _described(a), _described(b)
    if not across_machines:
        _same_machine(*head)
    sides = by_settings(a, b)
    shown = shown_of([asked for side in sides for asked, _ in side.values()])
    only_a, only_b = _lonely(sides[0], sides[1], shown), _lonely(sides[1], sides[0], shown)
    both = [key for key in sides[0] if key in sides[1]]
    if not both:
        text = f"no cell is in both; A has {'; '.join(only_a[:3])}; compare runs of equal settings"
        if len({asked.get(LIMIT) for side in sides for asked, _ in side.values()}) > 1:
            text += f" ({LIMIT} that nobody gave is a sweep's largest batch: give it to both)"
        raise Refused(text)
    cells: list[Cell] = []
    notes: list[str] = []
    for key in both:
        (asked, one), (_, other) = sides[0][key], sides[1][key]
        statuses = {_status(side)[0] for side in (one, other)}
        if statuses <= {"skipped", "predicted"}:
            notes.append(f"{_named(asked, shown)}: {' and '.join(sorted(statuses))} on both sides")
            continue
        otherwise = effective(one, other)
        notes += [f"{_named(asked, shown)}: effective {text}" for text in otherwise]
        notes += [f"{_named(asked, shown)}: {text}" for text in disturbed(one, other)]
        for metric in metrics:
            missing = one[metric].isna().all() and other[metric].isna().all()
            if missing and statuses == {"ok"}:
                notes.append(f"{_named(asked, shown)}: {metric} is on neither side")
                continue
            found = _judge(one, other, metric, across_machines, floor)
            mine, theirs = (str(side["point_id"].iloc[0]) for side in (one, other))
            cells.append(Cell(asked, metric, found, mine, theirs, otherwise))
    if not cells:
        raise Refused(f"nothing to compare: {'; '.join(_grouped(notes))}")
    notes = [*of_one_side(a, b, HOW), *_grouped(notes)]
    return Comparison(*head, shown, tuple(cells), only_a, only_b, tuple(notes))


def _judge(
    a: pd.DataFrame, b: pd.DataFrame, metric: str, across: bool, floor: float | None
) -> Judgement:
    """The verdict, or why none is given though figures may be there."""
    found = judge(_repeats(a, metric), _repeats(b, metric), METRICS[metric].better, floor)
    wrong = [
        f"{name} {status}" + (f": {reason}" if reason else "")
        for name, (status, reason) in (("A", _status(a)), ("B", _status(b)))
        if status != "ok"
    ]
    for name, side in (("A", a), ("B", b)):
        if side["requested"].map(profiled).any():
            wrong.append(f"{name} ran under nsys")
    if metric == "step_us":
        clocks = [sorted(set(side["step_source"].dropna())) for side in (a, b)]
        if all(clocks) and clocks[0] != clocks[1]:
            wrong.append(f"times by {', '.join(clocks[0])} and by {', '.join(clocks[1])}")
    mhz = [float(side["sm_clock_mhz"].median()) for side in (a, b)]
    if not across and abs(mhz[1] / mhz[0] - 1) > CLOCKS:  # False where a clock is NaN
        wrong.append(f"the GPUs ran at {mhz[0]:,.0f} MHz in A and {mhz[1]:,.0f} MHz in B")
    if not wrong:
        return found
    return replace(found, verdict=Verdict.AMBIGUOUS, reason="; ".join(wrong))


def profiled(requested: str) -> bool:
    """Whether a point of this configuration ran under nsys, whose times hold what that costs."""
    return NSYS in json.loads(requested)["instrument"]


def _repeats(side: pd.DataFrame, metric: str) -> Repeats:
    engines = tuple(
        tuple(map(float, group[metric].dropna()))
        for _, group in side.groupby(["run_id", "process"])
    )
    return Repeats(engines, FIGURES[metric].unit)


Side = dict[str, tuple[dict[str, Any], "pd.DataFrame"]]
"""Settings as one text -> (settings, rows)."""


def by_settings(*frames: pd.DataFrame) -> list[Side]:
    """The points of each frame by what was asked of them. A setting that one frame does not know,
    written before there was such a setting, tells no points apart unless the other sweeps it."""
    asked = [f["requested"].map(lambda text: settings(str(text))) for f in frames]
    swept = {name for one in asked for name in _varying(one)}
    known = [{name for settings in one for name in settings} for one in asked]
    common = set.intersection(*known)
    sides = []
    for frame, of_row in zip(frames, asked, strict=True):
        kept = of_row.map(
            lambda one: {
                k: v
                for k, v in one.items()
                if k in swept or (k in common and k.partition(".")[0] not in HOW)
            }
        )
        keys = kept.map(lambda one: json.dumps(one, sort_keys=True))
        sides.append(
            {key: (kept[rows.index[0]], rows) for key, rows in frame.groupby(keys, sort=False)}
        )
    return sides


def _varying(settings: Iterable[Mapping[str, Any]]) -> set[str]:
    """Names whose value is not equal in all."""
    found = list(settings)
    names = {name for one in found for name in one}
    return {name for name in names if len({repr(one.get(name)) for one in found}) > 1}


def shown_of(asked: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Names of settings that vary, and those that every table has."""
    varying = _varying(asked)
    ordered = dict.fromkeys([*AXES, *(name for one in asked for name in one)])
    return tuple(name for name in ordered if name in varying or name in ALWAYS)


def _lonely(mine: Side, theirs: Side, shown: Sequence[str]) -> tuple[str, ...]:
    """Cells that the other side lacks, each with the least that it differs in from one there."""
    found = []
    for asked in (asked for key, (asked, _) in mine.items() if key not in theirs):
        others = [(_differing(asked, other), other) for other, _ in theirs.values()]
        names, other = min(others, key=lambda one: _distance(one[0]))
        differs = " and ".join(
            f"{name}={as_written(other.get(name))}, not {as_written(asked.get(name))}"
            for name in names
        )
        near = f" (nearest: {differs})" if len(names) <= 3 else ""
        found.append(_named(asked, shown) + near)
    return tuple(found)


def _differing(asked: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    return [name for name in sorted({*asked, *other}) if asked.get(name) != other.get(name)]


def _distance(names: Sequence[str]) -> tuple[int, int]:
    """Points of the same axes come first: they were meant to be alike."""
    return sum(name in AXES for name in names), len(names)


def _named(asked: Mapping[str, Any], shown: Sequence[str]) -> str:
    """A cell as a command line would name it."""
    return " ".join(f"{name}={as_written(asked.get(name))}" for name in shown)


def _status(side: pd.DataFrame) -> tuple[str, str | None]:
    """The worst status of the point's engines, and its reason."""
    status = worst_status(side["status"])
    reasons = side[side["status"] == status]["reason"].dropna()
    return status, str(reasons.iloc[0]) if len(reasons) else None


def _described(frame: pd.DataFrame) -> dict[str, Any]:
    """Values of a side that are one for the whole run, or a list where they are not."""

    def values(column: str) -> Any:
        found = sorted(frame[column].dropna().unique().tolist(), key=str)
        return found[0] if len(found) == 1 else found or None

    names = ("run_id", "hardware_fingerprint", "gpu", "cpu", "git_sha", "torch_version")
    return {name: values(name) for name in names}


def _same_machine(a: Mapping[str, Any], b: Mapping[str, Any]) -> None:
    prints = a["hardware_fingerprint"], b["hardware_fingerprint"]
    if isinstance(prints[0], str) and prints[0] == prints[1]:  # a list: a side of several machines
        return
    machines = [f"{side['gpu'] or side['cpu']} ({side['hardware_fingerprint']})" for side in (a, b)]
    raise Refused(
        f"other machines: A is {machines[0]}, B {machines[1]}; the fingerprint covers CPU, memory, "
        "GPUs, driver and operating system. --across-machines compares them all the same"
    )


def _grouped(notes: Sequence[str]) -> Iterator[str]:
    """Notes that end alike as one, the cells counted."""
    endings: dict[str, list[str]] = {}
    for note in notes:
        name, _, ending = note.partition(": ")
        endings.setdefault(ending, []).append(name)
    for ending, names in endings.items():
        yield f"{names[0]}: {ending}" if len(names) == 1 else f"{len(names)} cells: {ending}"
