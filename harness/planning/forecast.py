"""How long a plan may take: from the nearest points and engine starts of earlier runs here

A time of an earlier run counts where these are equal: backend, model, mode, TP size, workload,
batch, and how it is measured. Of several the one that differs in fewest other settings is taken,
then the newest. What has none stays unknown: no figure is scaled or guessed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from harness.planning.plan import ENGINE_FIELDS, Plan, Point
from harness.settings.naming import settings
from harness.tables.marker import FAILED

_ENGINE = ("backend", "tp", "enforce_eager", "compile", "device", "model", "model.path")
_SECTIONS = ("workload", "measure", "instrument", "timing")
NEVER_IN_TIME = ("workload.seed", "engine.seed")


@dataclass(frozen=True)
class Known:
    """Seconds of one earlier point or engine start, in which run, and whether every setting that
    matters to it was equal."""

    seconds: float
    run: str
    equal: bool


@dataclass(frozen=True)
class _Seen:
    """An earlier time: `like` must be equal, of `rest` as much as possible."""

    like: dict[str, Any]
    rest: dict[str, Any]
    seconds: float
    run: str


Parts = tuple[dict[str, Any], dict[str, Any]]
Split = Callable[[Mapping[str, Any]], Parts]
Read = Callable[[Path], dict[str, float]]
"""A run's folder -> seconds by point_id."""


def duration(seconds: float) -> str:
    """42 s, 3 min, 1 h 20 min."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


class Forecast:
    """Estimates of a plan's points and engine starts.

    Attributes:
        points: point_id -> seconds of all its fresh engines, of the points that are not skipped.
        starts: engine_key -> seconds of one start; what is in neither is unknown.
    """

    def __init__(
        self, plan: Plan, points: Mapping[str, Known], starts: Mapping[str, Known], runs: int
    ) -> None:
        self.plan, self.points, self.starts, self.runs = plan, points, starts, runs
        self.known = bool(points)

    @classmethod
    def of(cls, plan: Plan, results_dir: Path) -> Forecast:
        """From the runs in `results_dir` on a machine of the plan's hardware fingerprint."""
        asked = {p.point_id: settings(p.cfg) for p in plan.points if p.skip is None}
        sought = [_Times(map(parts, asked.values()), parts, read) for parts, read in _KINDS]
        runs = 0
        for folder, cfgs in _runs(results_dir, plan.surroundings.get("hardware")):
            runs += 1
            for times in sought:
                times.look(folder, cfgs)
            if not any(times.open for times in sought):
                break
        points, engines = {}, {}
        for point in (point for point in plan.points if point.skip is None):
            if found := sought[0].nearest(asked[point.point_id]):
                fresh = int(point.cfg["measure"]["n_process"])
                points[point.point_id] = Known(found.seconds * fresh, found.run, found.equal)
            if found := sought[1].nearest(asked[point.point_id]):
                engines[point.engine_key] = found
        return cls(plan, points, engines, runs)

    def cell(self, point: Point) -> str:
        """The point's seconds in the listing; ~: of one that differs in some setting."""
        found = self.points.get(point.point_id)
        if found is None:
            return "" if point.skip is not None else "unknown"
        return f"{'' if found.equal else '~'}{found.seconds:.1f}"

    def lines(self) -> list[str]:
        """The sum, what it rests on and what it lacks."""
        running = [point for point in self.plan.points if point.skip is None]
        if not running:
            return []
        if not self.points and not self.starts:
            what = "they hold none of these points" if self.runs else "there are none"
            return [f"time unknown: it is taken from earlier runs of this machine, and {what}"]
        engines = _engine_starts(running)
        known_starts = sum(count for key, count in engines.items() if key in self.starts)
        seconds = sum(found.seconds for found in self.points.values())
        seconds += sum(self.starts[k].seconds * n for k, n in engines.items() if k in self.starts)
        missing = [
            f"{count} of {all_} {what}"
            for count, all_, what in (
                (len(running) - len(self.points), len(running), "points"),
                (sum(engines.values()) - known_starts, sum(engines.values()), "engine starts"),
            )
            if count
        ]
        near = sum(not found.equal for found in self.points.values())
        used = {known.run for known in (*self.points.values(), *self.starts.values())}
        newest = max(used, key=_time)
        others = f" and {len(used) - 1} more" if len(used) > 1 else ""
        said = f"{'more than' if missing else 'about'} {duration(seconds)}, by {newest}{others}"
        lines = [f"{said}; unknown: {', '.join(missing)}" if missing else said]
        if near:
            lines.append(f"~ {near} of the points by one that differs in other settings")
        return lines


def _engine_starts(running: list[Point]) -> dict[str, int]:
    """engine_key -> fresh engines."""
    found: dict[str, int] = {}
    for point in running:
        asked = int(point.cfg["measure"]["n_process"])
        found[point.engine_key] = max(asked, found.get(point.engine_key, 0))
    return found


def _point_parts(asked: Mapping[str, Any]) -> Parts:
    like = {
        name: value
        for name, value in asked.items()
        if name in (*_ENGINE, "batch") or name.partition(".")[0] in _SECTIONS
    }
    return _split(asked, like)


def _engine_parts(asked: Mapping[str, Any]) -> Parts:
    of_engine = {k: v for k, v in asked.items() if k.partition(".")[0] in ENGINE_FIELDS}
    return _split(of_engine, {k: v for k, v in of_engine.items() if k in (*_ENGINE, "cache")})


def _split(asked: Mapping[str, Any], like: dict[str, Any]) -> Parts:
    alike = {name: value for name, value in like.items() if name not in NEVER_IN_TIME}
    names = set(asked) - set(like) - set(NEVER_IN_TIME)
    alike.pop("measure", None)  # the preset's name; its values count
    alike.pop("measure.n_process", None)
    return alike, {name: asked[name] for name in names}


class _Times:
    """Earlier times of one kind: of points, or of engine starts.

    Attributes:
        open: what is sought and has not been found with every setting equal.
    """

    def __init__(self, sought: Iterable[Parts], parts: Split, read: Read) -> None:
        wanted = list(sought)
        self._parts, self._read = parts, read
        self._likes = [like for like, _ in wanted]
        self.open = list(wanted)
        self._seen: list[_Seen] = []

    def look(self, folder: Path, cfgs: Mapping[str, Mapping[str, Any]]) -> None:
        """Takes what a run has of what is sought; its files are read only if it has some."""
        found = {point_id: self._parts(cfg) for point_id, cfg in cfgs.items()}
        found = {k: parts for k, parts in found.items() if parts[0] in self._likes}
        if not found:
            return
        for point_id, seconds in self._read(folder).items():
            if point_id in found:
                self._seen.append(_Seen(*found[point_id], seconds, folder.name))
                self.open = [parts for parts in self.open if parts != found[point_id]]

    def nearest(self, asked: Mapping[str, Any]) -> Known | None:
        """The first, which is the newest, of those that differ in fewest settings."""
        like, rest = self._parts(asked)
        fit = [one for one in self._seen if one.like == like]
        if not fit:
            return None
        best = min(fit, key=lambda one: _differing(one.rest, rest))
        return Known(best.seconds, best.run, _differing(best.rest, rest) == 0)


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> int:
    return sum(one.get(name) != other.get(name) for name in {*one, *other})


def _time(run: str) -> str:
    """The part of a run's name that is a time."""
    return "-".join(run.rsplit("-", 3)[1:])


def _runs(results_dir: Path, hardware: Any) -> Iterator[tuple[Path, dict[str, dict[str, Any]]]]:
    """(folder, settings by point_id) of this machine's runs, newest first; what is no run is passed
    over."""
    found = []
    for file in results_dir.glob("*/plan.json"):
        try:
            stored = json.loads(file.read_text(encoding="utf-8"))
            if stored["surroundings"]["hardware"] == hardware:
                cfgs = {str(p["point_id"]): settings(p["cfg"]) for p in stored["points"]}
                found.append((str(stored["created_at"]), file.parent, cfgs))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
    for _, folder, cfgs in sorted(found, key=lambda one: one[:2], reverse=True):
        yield folder, cfgs


def _points(folder: Path) -> dict[str, float]:
    """point_id -> mean seconds of a fresh engine's measuring, of points that were measured."""
    seconds: dict[str, list[float]] = {}
    for file in folder.glob("points/[!.]*/point.json"):
        try:
            marker = json.loads(file.read_text(encoding="utf-8"))
            if marker["status"] not in (*FAILED, "skipped") and marker["wall_s"] > 0:
                seconds.setdefault(marker["point_id"], []).append(float(marker["wall_s"]))
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue
    return {point_id: fmean(values) for point_id, values in seconds.items()}


def _starts(folder: Path) -> dict[str, float]:
    """point_id -> mean seconds that its engine took to start, of points that began an engine."""
    from harness.store import StoreError, load

    try:
        rows = load(folder).table("phases", ["point_id", "phase", "seconds", "shared"])
    except StoreError:
        return {}
    rows = rows[(rows["phase"] == "total") & ~rows["shared"] & rows["seconds"].notna()]
    return {str(k): float(v) for k, v in rows.groupby("point_id")["seconds"].mean().items()}


_KINDS: tuple[tuple[Split, Read], ...] = ((_point_parts, _points), (_engine_parts, _starts))
