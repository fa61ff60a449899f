"""Submits the jobs of a sweep, waits for all of them, and prints their tables as one"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.fanout.folder import BEGUN, OUTPUT, FanOut, Job, check_jobs, open_fan_out, reopen
from harness.fanout.job import measure_job
from harness.sweep.commands import AGAIN, interrupted_once, write_status
from harness.sweep.execute import units
from harness.sweep.session import Outcome
from harness.sweep.worker import Functions
from harness.tables.console import stdout
from harness.tables.marker import FAILED, KEPT

Submit = Callable[[Callable[[Any], int], Sequence[list[str]], Path], Sequence[Any]]
"""(task, overrides of each job, sweep folder) -> Hydra's returns, once all jobs have ended."""
START_S = 20.0
"""How long a job may take from its start to its lock, imports included."""
WATCH_S = 1.0
"""How often the folders of jobs are asked whether one has ended."""


def fan_out(
    configs: Sequence[dict[str, Any]],
    launcher: str,
    submit: Submit,
    functions: Functions | None = None,
) -> int:
    """Runs, or continues, a sweep as jobs of `launcher`, one for each engine; prints the tables of
    all and, as the last line, one line of JSON. -> exit status, as of `run_points`.

    Raises:
        SettingsError: a setting that no machine could run; nothing was submitted then.
    """
    check_jobs(configs, launcher)
    folder = open_fan_out(configs, functions or Functions())
    try:
        return _go(folder, launcher, submit)
    finally:
        folder.close()


def _go(folder: FanOut, launcher: str, submit: Submit) -> int:
    todo = [job for job in folder.jobs if job.status != 0]
    verb = "continuing fan-out" if folder.continued else "fan-out"
    _say(f"{verb} {folder.path}: {len(todo)} of {len(folder.jobs)} jobs by {launcher}")
    interrupted, problem = False, None
    for job in todo:
        if not job.running:
            (job.folder / BEGUN).unlink(missing_ok=True)
    with interrupted_once():
        try:
            overrides = [[f"hydra.sweep.subdir={job.folder.name}"] for job in todo]
            with _watched(todo):
                returns = submit(measure_job, overrides, folder.path) if todo else []
            for job, returned in zip(todo, returns, strict=True):
                if isinstance(returned._return_value, Exception):
                    _say(f"error: {job.folder.name}: {returned._return_value}")
        except KeyboardInterrupt:
            interrupted = True
            _say(f"interrupted; what the scheduler has may go on; {AGAIN} when it has ended")
        except Exception as error:  # of the launcher, for a job that died or the scheduler itself
            problem = " ".join(str(error).split())[:500] or type(error).__name__
            _say(f"error: {launcher}: {problem}")
            _wait(todo)
    for job in todo if problem is not None else ():
        _settle(job, str(problem))
    line = _report(folder)
    if not line["pending"] and all(job.status is not None for job in folder.jobs):
        folder.mark_finished()
    failed = any(line[status] for status in (*FAILED, "pending"))
    failed = failed or any(job.status != 0 for job in folder.jobs)
    return 130 if interrupted else int(failed)


@contextmanager
def _watched(jobs: Sequence[Job]) -> Iterator[None]:
    """Says of each job that it has ended; launchers say nothing before the last one has."""
    waiting = [(job, job.ended_ns) for job in jobs]  # None, or when an earlier attempt ended
    over = threading.Event()
    thread = threading.Thread(target=_tell_ends, args=(waiting, over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _tell_ends(waiting: list[tuple[Job, int | None]], over: threading.Event) -> None:
    number, last = len(waiting), False
    while not last:
        last = over.wait(WATCH_S)  # what ended meanwhile is told still
        for job, before in [one for one in waiting if one[0].ended_ns not in (None, one[1])]:
            waiting.remove((job, before))
            count = f"{number - len(waiting)} of {number}"
            _say(f"{job.folder.name} has ended with status {job.status} ({count})")


def _wait(jobs: Sequence[Job]) -> None:
    """Launchers give up at the first job that died; the others go on, and this waits for those that
    have begun, or begin within START_S."""
    deadline = time.monotonic() + START_S
    while any(job.running for job in jobs) or (
        time.monotonic() < deadline and not all(job.begun for job in jobs)
    ):
        time.sleep(0.5)


def _settle(job: Job, problem: str) -> None:
    """A job that did not end by itself: each of its points without a row gets one that says so."""
    if job.status is not None:
        return
    if job.running:
        _say(f"{job.folder.name} is still running; {AGAIN} when it has ended")
        return
    if not job.runs:
        _say(f"{job.folder.name} has planned no points: {job.folder / OUTPUT} says why; if it is "
             "not there, the job has not begun")  # fmt: skip
    for path in job.runs[-1:]:
        run = reopen(path)
        if run is None:
            continue
        for note in run.notes:
            _say(note)
        try:
            environment = {"fingerprint": run.plan.surroundings["hardware"]}
            for unit in units(run.plan):
                if run.marker(unit.point, unit.process) is None:
                    outcome = Outcome("error", f"the job died: {problem}")
                    if unit.point.skip is not None:
                        outcome = Outcome("skipped", unit.point.skip)
                    out = run.begin(unit.point, unit.process)
                    write_status(
                        out, unit.point, unit.process, run.run_id, outcome, environment=environment
                    )
                    run.finish(
                        unit.point, unit.process, out,
                        status=outcome.status, reason=outcome.reason, wall_s=None,
                    )  # fmt: skip
        finally:
            run.close()


def _report(folder: FanOut) -> dict[str, Any]:
    """Prints the tables and the last line, which it returns."""
    from harness.store import StoreError
    from harness.tables.merged import merge
    from harness.tables.report import print_summary, summary

    line: dict[str, Any] = {"run": str(folder.path), "jobs": len(folder.jobs)}
    line |= {"points": folder.points} | dict.fromkeys((*KEPT, *FAILED), 0)
    runs = folder.runs
    for job in folder.jobs:
        if len(job.runs) > 1:
            taken = next(run for run in runs if run.parent == job.folder)
            _say(f"{job.folder.name} has {len(job.runs)} runs, of several machines; the table has "
                 f"{taken.name}")  # fmt: skip
    if runs:
        try:
            results = merge(runs, across_machines=True)
            for note in results.notes:
                _say(note)
            print_summary(results, stdout())
            line |= summary(results)["status"].value_counts().to_dict()
        except StoreError as error:
            _say(f"error: {error}")
    line["pending"] = line["points"] - sum(line[status] for status in (*KEPT, *FAILED))
    print(json.dumps(line, separators=(",", ":"), allow_nan=False), flush=True)
    return line


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
