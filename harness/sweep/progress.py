"""What a run says while it goes on: a bar on a terminal, plain lines elsewhere, on stderr."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from harness.planning.forecast import duration
from harness.planning.plan import Plan, Point
from harness.settings.naming import named, settings, varying


class Estimate:
    """Time left, from what the points and engine starts of this run took so far."""

    def __init__(self, points: int, starts: int) -> None:
        self.points_left = points
        self.starts_left = starts
        self._points: list[float] = []
        self._starts: list[float] = []

    def started(self, seconds: float) -> None:
        self.starts_left = max(0, self.starts_left - 1)
        self._starts.append(seconds)

    def ended(self, seconds: float) -> None:
        """A point was measured; skipped ones take no time and are not counted anywhere here."""
        self.points_left = max(0, self.points_left - 1)
        self._points.append(seconds)

    def left_s(self) -> float | None:
        """Seconds; None before the first point has ended."""
        if not self._points:
            return None
        point = sum(self._points) / len(self._points)
        start = sum(self._starts) / len(self._starts) if self._starts else 0.0
        return self.points_left * point + self.starts_left * start

    def text(self) -> str:
        seconds = self.left_s()
        if seconds is None:
            return ""
        return f"about {duration(seconds)} left"


class Reporter:
    """Follows a run. A context manager, since the bar must be taken down whatever happens.

    Args:
        plan: names the settings that vary, which name a point.
        total: rows still to be written; points, starts: of these, what is to be measured, and the
            engines for it.
        console: stderr by default; stdout is for results.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        total: int,
        points: int,
        starts: int,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console = console or Console(stderr=True)
        self.estimate = Estimate(points, starts)
        self.total = total
        self.done = 0
        self._clock = clock
        self._since = clock()
        asked = [settings(point.cfg) for point in plan.points]
        self._varying = varying(asked) or ["tp", "batch"]
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Reporter:
        if self.console.is_terminal:
            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
            # Twice a second: the bar's thread must not take a core from the ranks.
            self._bar = Progress(
                *columns, console=self.console, refresh_per_second=2, transient=True
            )
            self._task = self._bar.add_task("", total=self.total)
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        """One line, above the bar."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def name(self, point: Point) -> str:
        """The varying settings of a point, as a command line would write them."""
        return named(settings(point.cfg), self._varying)

    def engine_starts(self, point: Point) -> None:
        self._since = self._clock()
        self._describe(f"starting the engine of {self.name(point)}")

    def engine_started(self) -> None:
        self.estimate.started(self._clock() - self._since)

    def point_begins(self, point: Point) -> None:
        self._since = self._clock()
        self._describe(self.name(point))

    def phase(self, point: Point, text: str) -> None:
        self._describe(f"{self.name(point)}: {text}")

    def point_ended(self, point: Point, status: str, reason: str | None, wall_s: float) -> None:
        self.done += 1
        why = f" ({reason})" if reason and status != "ok" else ""
        line = f"[{self.done}/{self.total}] {self.name(point)}: {status}{why}"
        if status != "skipped":
            self.estimate.ended(wall_s)
            left = f", {self.estimate.text()}" if self.estimate.points_left else ""
            line += f" {wall_s:.1f} s{left}"
        self.say(line)
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self.done)

    def _describe(self, text: str) -> None:
        if self._bar is not None and self._task is not None:
            left = self.estimate.text()
            self._bar.update(self._task, description=f"{text}{'  ' + left if left else ''}")
