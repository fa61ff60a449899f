"""What `run` and `list` do with the composed configurations."""

from __future__ import annotations

import json
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from engine.errors import ConfigError
from harness.calibration.measure import ensure
from harness.machine.cache import CacheError, compile_cache
from harness.machine.capabilities import Machine
from harness.machine.fingerprint import surroundings
from harness.machine.models import ModelError
from harness.measuring.trace import TraceError
from harness.planning.device_lock import LockError, devices_of, held
from harness.planning.forecast import Forecast
from harness.planning.plan import Plan, Point, build
from harness.planning.runs import RunFolder, open_run
from harness.settings.config import AXES, SettingsError, as_written
from harness.settings.naming import settings, varying
from harness.store import StoreError
from harness.sweep.execute import Execution
from harness.sweep.session import Outcome
from harness.sweep.worker import Functions
from harness.tables.console import print_line, print_table, stdout
from harness.tables.marker import FAILED, KEPT
from harness.tables.storage import StorageError, storing

SKIPPED, SECONDS = "skipped because", "about s"
AGAIN = "the same command continues this run"


def make_plan(configs: Sequence[dict[str, Any]]) -> Plan:
    """The plan of this machine.

    Raises:
        SettingsError: a setting that cannot stand, whoever refuses it.
    """
    try:
        return build(configs, machine=Machine.probe(), surroundings=surroundings())
    except (ConfigError, ModelError, TraceError) as error:
        raise SettingsError(str(error)) from error


def list_points(configs: Sequence[dict[str, Any]]) -> int:
    """Prints the points in the order in which `run` takes them, and their time by earlier runs;
    nothing is started or written."""
    plan = make_plan(configs)
    console = stdout()
    print_line(console, headline(plan))
    forecast = Forecast.of(plan, Path(plan.points[0].cfg["results_dir"]))
    asked = [settings(point.cfg) for point in plan.points]
    names = varying(asked)
    headings = ["#", "point", "engine", *names, *([SECONDS] if forecast.known else []), SKIPPED]
    rows = []
    for point, one in zip(plan.points, asked, strict=True):
        row = [str(point.index), point.point_id, point.engine_key[:6]]
        row += [as_written(one.get(name)) for name in names]
        row += [forecast.cell(point)] if forecast.known else []
        rows.append([*row, point.skip or ""])
    print_table(console, headings, rows, wrapped=SKIPPED, right=[SECONDS])
    skipped = sum(point.skip is not None for point in plan.points)
    print_line(
        console, f"{len(plan.points)} points, {skipped} skipped, {plan.engine_starts} engine starts"
    )
    for line in forecast.lines():
        print_line(console, line)
    return 0


def headline(plan: Plan) -> str:
    """The experiment and the axes that do not vary in it."""
    same = [axis for axis in AXES if len(_values(plan, axis)) == 1]
    return f"{plan.experiment}: " + ", ".join(f"{a}={_values(plan, a)[0]}" for a in same)


def _values(plan: Plan, axis: str) -> list[str]:
    return list(dict.fromkeys(as_written(point.axes[axis]) for point in plan.points))


def run_points(configs: Sequence[dict[str, Any]], functions: Functions | None = None) -> int:
    """Runs, or continues, the sweep; prints its tables and, as the last line, one line of JSON.

    Raises:
        SettingsError: before anything has started.
    """
    plan = make_plan(configs)
    cfg = plan.points[0].cfg
    try:
        compiled = compile_cache(any(p.cfg["cache"] == "warm" and not p.skip for p in plan.points))
    except CacheError as error:
        raise SettingsError(str(error)) from error
    run = open_run(Path(cfg["results_dir"]), plan, cfg["resume"])
    interrupted = complete = reported = False
    try:
        with interrupted_once():
            try:
                complete = _execute(run, functions or Functions(), compiled)
            except KeyboardInterrupt:
                interrupted = True
                _say_interrupted()
            except (StorageError, LockError) as error:
                print(f"error: {error}", file=sys.stderr)
            try:
                reported = report(run)
            except KeyboardInterrupt:
                interrupted = True
                _say_interrupted()
            print(result_line(run), flush=True)
    finally:
        # Last: one that is ended while it prints its tables is continued, to print them.
        marked = complete and not interrupted and _mark_finished(run)
        run.close()
    failed = any(run.counts().get(status) for status in FAILED)
    return 130 if interrupted else int(failed or not marked or not reported)


def _say_interrupted() -> None:
    print(f"interrupted; {AGAIN}", file=sys.stderr)


def _mark_finished(run: RunFolder) -> bool:
    """False, after saying so, if there is no room for it."""
    try:
        with storing(run.path):
            run.mark_finished()
        return True
    except StorageError as error:
        print(f"error: {error}", file=sys.stderr)
        return False


def _execute(run: RunFolder, functions: Functions, compiled: Path) -> bool:
    """True if every point has a row."""
    points = run.plan.points
    execution = Execution(run, functions, write_status, compiled)
    with execution.reporter() as reporter:
        reporter.say(_announcement(run, execution))
        devices = devices_of([unit.point for group in execution.groups for unit in group])
        with held(devices, points[0].cfg["device_lock"], str(run.path), reporter.say):
            if any(point.skip is None and point.cfg["device"] == "cuda" for point in points):
                missing = ensure(points[0].cfg)
                if missing is not None:
                    reporter.say(f"no ceilings of this GPU, so MBU and MFU are null: {missing}")
            complete = execution.go(reporter)
        if not complete:
            reporter.say(f"stopped by fail_fast; {AGAIN}")
    return complete


@contextmanager
def interrupted_once() -> Iterator[None]:
    """Ctrl-C, or a scheduler's SIGTERM, raises KeyboardInterrupt once; what follows is ending the
    engine and printing what is there, which a second one must not break off."""
    numbers = (signal.SIGINT, signal.SIGTERM)

    def interrupt(number: int, frame: FrameType | None) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = [signal.signal(number, interrupt) for number in numbers]
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is interrupt:  # else the process is about to end
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)


def report(run: RunFolder) -> bool:
    """Prints the summary tables; False if they could not be made."""
    from harness.tables.report import print_summary

    try:
        print_summary(run.path, stdout())
        return True
    except StoreError as error:
        print(f"error: {error}", file=sys.stderr)
    except Exception:
        traceback.print_exc()
        print(f"the rows are in {run.path}; python -m harness collect prints them", file=sys.stderr)
    return False


def result_line(run: RunFolder) -> str:
    """One line of JSON for scripts: the run's folder and its points by status."""
    counts = run.counts()
    line: dict[str, Any] = {"run": str(run.path), "points": len(run.plan.points)}
    line |= {status: counts.get(status, 0) for status in (*KEPT, *FAILED)}
    line["pending"] = len(run.plan.points) - sum(counts.values())
    return json.dumps(line, separators=(",", ":"), allow_nan=False)


def write_status(
    out: Path,
    point: Point,
    process: int,
    run_id: str,
    outcome: Outcome,
    environment: Mapping[str, Any] | None = None,
) -> None:
    """The tables of a point that was skipped or whose engine could not say how it ended;
    `environment`: of the machine that it was for, this one if left out."""
    from harness.sweep.point import status_only_tables
    from harness.tables.point_files import write_point

    tables = status_only_tables(
        point,
        outcome.status,
        outcome.reason,
        run_id=run_id,
        process=process,
        environment=environment,
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
