"""What `run` and `list` do with the composed configurations."""

from __future__ import annotations

import json
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from harness import ceilings
from harness.config import AXES, SettingsError, as_written
from harness.console import print_line, print_table, stdout
from harness.execute import Execution
from harness.fingerprint import surroundings
from harness.machine import Machine
from harness.models import ModelError, cache_root
from harness.plan import Plan, Point, build
from harness.runs import FAILED, KEPT, RunFolder, open_run
from harness.session import Outcome
from harness.trace import TraceError
from harness.worker import Functions

SKIPPED = "skipped because"


def make_plan(configs: Sequence[dict[str, Any]]) -> Plan | None:
    """The plan of this machine, or None after saying on stderr which setting cannot stand."""
    try:
        return build(configs, machine=Machine.probe(), surroundings=surroundings())
    except (SettingsError, ConfigError, ModelError, TraceError) as error:
        print(f"error: {error}", file=sys.stderr)
        return None


def list_points(configs: Sequence[dict[str, Any]]) -> int:
    """Prints the points in the order in which `run` takes them; nothing is started or written."""
    plan = make_plan(configs)
    if plan is None:
        return 1
    console = stdout()
    print_line(console, headline(plan))
    varying = [axis for axis in AXES if len(_values(plan, axis)) > 1]
    headings = ["#", "point", "engine", *varying, SKIPPED]
    rows = [
        [str(point.index), point.point_id, point.engine_key[:6]]
        + [as_written(point.axes[axis]) for axis in varying]
        + [point.skip or ""]
        for point in plan.points
    ]  # an axis that has one value everywhere is no column
    print_table(console, headings, rows, wrapped=SKIPPED)
    skipped = sum(point.skip is not None for point in plan.points)
    print_line(
        console, f"{len(plan.points)} points, {skipped} skipped, {plan.engine_starts} engine starts"
    )
    return 0


def headline(plan: Plan) -> str:
    """The experiment and the axes that do not vary in it."""
    same = [axis for axis in AXES if len(_values(plan, axis)) == 1]
    return f"{plan.experiment}: " + ", ".join(f"{a}={_values(plan, a)[0]}" for a in same)


def _values(plan: Plan, axis: str) -> list[str]:
    return list(dict.fromkeys(as_written(point.axes[axis]) for point in plan.points))


def run_points(configs: Sequence[dict[str, Any]], functions: Functions | None = None) -> int:
    """Runs, or continues, the sweep; prints its tables and, as the last line, one line of JSON."""
    plan = make_plan(configs)
    if plan is None:
        return 1
    cfg = plan.points[0].cfg
    try:
        run = open_run(Path(cfg["results_dir"]), plan, cfg["resume"])
    except SettingsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    # A scheduler's SIGTERM ends a run as Ctrl-C does: finished points stay, no engine is left.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    interrupted = False
    try:
        execution = Execution(run, functions or Functions(), write_status, cache_root() / "compile")
        with execution.reporter() as reporter:
            reporter.say(_announcement(run, execution))
            if any(point.skip is None and point.cfg["device"] == "cuda" for point in plan.points):
                missing = ceilings.ensure(cfg)
                if missing is not None:
                    reporter.say(f"no ceilings of this GPU, so MBU and MFU are null: {missing}")
            try:
                complete = execution.go(reporter)
            except KeyboardInterrupt:
                complete, interrupted = False, True
            if not complete:
                reporter.say(
                    f"{'interrupted' if interrupted else 'stopped by fail_fast'}; the same command "
                    "continues this run"
                )
    finally:
        run.close()
    reported = report(run)
    failed = any(run.counts().get(status) for status in FAILED)
    return 130 if interrupted else int(failed or not complete or not reported)


def report(run: RunFolder) -> bool:
    """The summary tables, then the line for scripts; False if the tables could not be made."""
    from harness.report import print_summary

    made = True
    try:
        print_summary(run.path, stdout())
    except Exception:
        made = False
        traceback.print_exc()
        print(f"the rows are in {run.path}; python -m harness collect prints them", file=sys.stderr)
    counts = run.counts()
    line: dict[str, Any] = {"run": str(run.path), "points": len(run.plan.points)}
    line |= {status: counts.get(status, 0) for status in (*KEPT, *FAILED)}
    line["pending"] = len(run.plan.points) - sum(counts.values())
    print(json.dumps(line, separators=(",", ":")), flush=True)
    return made


def write_status(out: Path, point: Point, process: int, run_id: str, outcome: Outcome) -> None:
    """The tables of a point that was skipped or whose engine could not say how it ended."""
    from harness.point import status_only_tables
    from harness.store import write_point

    tables = status_only_tables(
        point,
        outcome.status,
        outcome.reason,
        run_id=run_id,
        process=process,
        traceback=outcome.traceback,
    )
    write_point(out, tables)


def _announcement(run: RunFolder, execution: Execution) -> str:
    points = len(run.plan.points)
    if not run.continued:
        return f"run {run.path}: {points} points, {execution.starts_left} engine starts"
    counts = run.counts()
    kept = sum(counts.get(status, 0) for status in KEPT)
    again = sum(counts.get(status, 0) for status in FAILED)
    redo = f", {again} failed ones are measured again" if again else ""
    return f"continuing run {run.path}: {kept} of {points} points are there{redo}"
