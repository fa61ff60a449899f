"""Runs a plan: one engine after the other, every point ending as a row."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console

from harness.planning.plan import Plan, Point, code_key
from harness.planning.runs import RunFolder
from harness.sweep.progress import Reporter
from harness.sweep.session import Outcome, Session
from harness.sweep.worker import Functions
from harness.tables.marker import FAILED, KEPT
from harness.tables.storage import StorageError, check_room, storing

WriteStatus = Callable[[Path, Point, int, str, Outcome], None]
"""(folder, point, process, run id, outcome): writes the tables of a point that has none."""


@dataclass(frozen=True)
class Unit:
    """One point measured by one engine; `process` counts the fresh engines of a point from 0."""

    point: Point
    process: int


class Execution:
    """Runs what a run folder does not hold yet.

    Args:
        run: locked by this process.
        functions: what a session's child calls.
        write_status: how a row without measurement is written.
        cache_root: where compile caches of cache=warm stay; those of cache=cold live as long as
            their engine, inside the run folder.
    """

    def __init__(
        self, run: RunFolder, functions: Functions, write_status: WriteStatus, cache_root: Path
    ) -> None:
        self.run = run
        self.plan: Plan = run.plan
        self.functions = functions
        self.write_status = write_status
        self.cache_root = cache_root
        self.engine_starts = 0
        todo = [unit for unit in units(self.plan) if not self._kept(unit)]
        self.groups = [list(group) for _, group in groupby(todo, key=_engine)]

    @property
    def units_left(self) -> int:
        """Rows still to be written, skipped points among them."""
        return sum(map(len, self.groups))

    @property
    def points_left(self) -> int:
        """Measurements still to be made."""
        return sum(len(group) for group in self.groups if group[0].point.skip is None)

    @property
    def starts_left(self) -> int:
        return sum(group[0].point.skip is None for group in self.groups)

    def reporter(self, console: Console | None = None) -> Reporter:
        """A reporter of what is left to do."""
        return Reporter(
            self.plan,
            total=self.units_left,
            points=self.points_left,
            starts=self.starts_left,
            console=console,
        )

    def go(self, reporter: Reporter) -> bool:
        """True if every point has a row now; False where fail_fast stopped it.

        Raises:
            KeyboardInterrupt, StorageError: after the engine at work was ended; finished points are
                in place.
        """
        self._say_notes(reporter)
        for group in self.groups:
            if group[0].point.skip is not None:
                for unit in group:
                    self._record(unit, Outcome("skipped", unit.point.skip), None, 0.0, reporter)
            elif not self._run_group(group, reporter):
                return False
        return True

    def _run_group(self, group: Sequence[Unit], reporter: Reporter) -> bool:
        """The units of one engine; after a failure the next one gets a fresh engine."""
        session: Session | None = None
        try:
            for place, unit in enumerate(group):
                if session is None:
                    session = self._new_session(unit, reporter)
                    outcome = self._start(session, unit, reporter)
                    if outcome.status != "ok":
                        # The configuration is the others' too: they would fail the same way.
                        return self._record_all(group[place:], outcome, reporter)
                session.on_progress = _phases(reporter, unit.point)
                outcome = self._measure(session, unit, reporter)
                if not outcome.engine_alive:
                    session.kill()
                    session = None
                if outcome.status in FAILED and unit.point.cfg["fail_fast"]:
                    return False
            if session is not None:
                session.close()
        finally:
            if session is not None:
                session.kill()
        return True

    def _new_session(self, unit: Unit, reporter: Reporter) -> Session:
        self.engine_starts += 1
        name = f"{unit.point.engine_key}-{unit.process}-{time.time_ns()}.log"
        return Session(self.run.path / "logs" / name, self.functions, _phases(reporter, unit.point))

    def _start(self, session: Session, unit: Unit, reporter: Reporter) -> Outcome:
        point = unit.point
        reporter.engine_starts(point)
        cache = self._cache_dir(point)
        outcome = session.start(point.cfg, cache, point.cfg["measure"]["startup_timeout_s"])
        if outcome.status == "ok":
            reporter.engine_started()
        return outcome

    def _cache_dir(self, point: Point) -> Path:
        if point.cfg["cache"] == "warm":
            return self.cache_root / code_key(point.cfg)
        cold = self.run.path / "cache"
        shutil.rmtree(cold, ignore_errors=True)  # the engine that had it has ended
        with storing(self.run.path):
            cold.mkdir()
        return cold

    def _measure(self, session: Session, unit: Unit, reporter: Reporter) -> Outcome:
        with self._storing(unit, 0.0, reporter):
            out = self.run.begin(unit.point, unit.process)
        reporter.point_begins(unit.point)
        since = time.monotonic()
        timeout_s = unit.point.cfg["measure"]["point_timeout_s"]
        outcome = session.measure(unit.point, unit.process, out, timeout_s)
        self._record(unit, outcome, out, time.monotonic() - since, reporter)
        return outcome

    def _record_all(self, group: Sequence[Unit], outcome: Outcome, reporter: Reporter) -> bool:
        for unit in group:
            self._record(unit, outcome, None, 0.0, reporter)
            if unit.point.cfg["fail_fast"]:
                return False
        return True

    def _record(
        self, unit: Unit, outcome: Outcome, out: Path | None, wall_s: float, reporter: Reporter
    ) -> None:
        with self._storing(unit, wall_s, reporter):
            if outcome.status in FAILED:
                check_room(self.run.path, outcome.reason)
            self._write(unit, outcome, out, wall_s)
        self._say_notes(reporter)
        reporter.point_ended(unit.point, outcome.status, outcome.reason, wall_s)

    def _say_notes(self, reporter: Reporter) -> None:
        while self.run.notes:
            reporter.say(self.run.notes.pop(0))

    @contextmanager
    def _storing(self, unit: Unit, wall_s: float, reporter: Reporter) -> Iterator[None]:
        """Where there is no room for a point's files, it ends as an error."""
        try:
            with storing(self.run.path):
                yield
        except StorageError as error:
            self.run.lose(unit.point, unit.process)
            reporter.point_ended(unit.point, "error", str(error), wall_s)
            raise

    def _write(self, unit: Unit, outcome: Outcome, out: Path | None, wall_s: float) -> None:
        if not outcome.has_tables:
            out = self.run.begin(unit.point, unit.process)  # nothing half-written stays
            self.write_status(out, unit.point, unit.process, self.run.run_id, outcome)
        assert out is not None
        if outcome.traceback:
            (out / "traceback.txt").write_text(outcome.traceback, encoding="utf-8")
        self.run.finish(
            unit.point,
            unit.process,
            out,
            status=outcome.status,
            reason=outcome.reason,
            wall_s=wall_s,
        )

    def _kept(self, unit: Unit) -> bool:
        marker = self.run.marker(unit.point, unit.process)
        return marker is not None and marker.status in KEPT


def units(plan: Plan) -> list[Unit]:
    """Points x fresh engines (measure.n_process): the first engine of every configuration, then the
    second of each, and so on. The engines of one configuration then lie apart in time, so that a
    machine that drifts does so for all of them alike."""
    groups = [list(group) for _, group in groupby(plan.points, key=lambda point: point.engine_key)]
    return [
        Unit(point, process)
        for process in range(max(map(_processes, plan.points), default=0))
        for points in groups
        for point in points
        if process < _processes(point)
    ]


def _processes(point: Point) -> int:
    """A skipped point has one row, however many engines it was to have."""
    return int(point.cfg["measure"]["n_process"]) if point.skip is None else 1


def _engine(unit: Unit) -> tuple[Any, ...]:
    return unit.point.engine_key, unit.process, unit.point.skip


def _phases(reporter: Reporter, point: Point) -> Callable[[str], None]:
    return lambda text: reporter.phase(point, text)
