"""Plans that are executed, and how their points ended; whoever calls it replaces the sessions."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from rich.console import Console

from harness.planning.plan import Plan, Point
from harness.planning.runs import RunFolder
from harness.sweep.execute import Execution
from harness.sweep.session import Outcome
from harness.sweep.worker import Functions
from tests.support.plans import plan, sweep


def write_status(out: Path, point: Point, process: int, run_id: str, outcome: Outcome) -> None:
    """The tables of a point that left none: one file that says why."""
    assert list(out.iterdir()) == [], "nothing half-written stays"
    (out / "points.parquet").write_text(f"{run_id} {outcome.status} {outcome.reason}")


def go(run: RunFolder, console: Console | None = None) -> tuple[bool, Execution]:
    """Runs what is missing; -> whether all of it ended, and the execution."""
    execution = Execution(run, Functions(), write_status, run.path.parent / "warm")
    console = console or Console(file=io.StringIO())
    with execution.reporter(console) as reporter:
        return execution.go(reporter), execution


def statuses(run: RunFolder) -> list[str | None]:
    """Of each point in the order of the plan; None of one that has not ended."""
    markers = [run.marker(point) for point in run.plan.points]
    return [marker.status if marker else None for marker in markers]


def eight(**fixed: Any) -> Plan:
    """Eight points on two engines."""
    return plan(sweep(fixed, tp=[1, 2], batch=[1, 2, 4, 8]))
