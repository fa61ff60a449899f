"""`python -m harness profile`: one point under nsys, its export read back beside the run"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from harness.nsys.command import Nsys, NsysError, deafness, find, report_of
from harness.nsys.read_back import read_back
from harness.planning.device_lock import LockError, devices_of, held
from harness.planning.plan import Plan, Point
from harness.planning.runs import create
from harness.settings.config import AXES, SettingsError, as_written
from harness.settings.naming import settings, varying
from harness.sweep.commands import interrupted_once, make_plan
from harness.tables.console import stdout
from harness.tables.marker import read_marker

HARNESS = (sys.executable, "-m", "harness")
SWITCH = "instrument.nsys=true"
_USABLE = ("ok", "contaminated")
REPORT_S = 900.0
"""What nsys may take beside the engine's start and the point: calibration, its own start, the
report. In a graph nsys and symmetric memory have been seen to wait for each other for ever."""


def profile_point(
    configs: Sequence[dict[str, Any]], words: Sequence[str], program: Sequence[str] = HARNESS
) -> int:
    """Runs the one point of the configurations under nsys, as an ordinary run with one more pass,
    exports the report and reads it back. Everything is kept in the run's folder, the report and its
    tables in points/<point>-nsys/.

    Args:
        words: the command line that gave the configurations, for the process that nsys starts.
        program: what that process runs.
    """
    plan = make_plan(configs)
    try:
        point = the_point(plan)
        nsys = _nsys([*program, "run", *words])
        check(point)
        return _profile(nsys, plan, point, [*program, "run", *words])
    except (SettingsError, NsysError, LockError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def the_point(plan: Plan) -> Point:
    """The plan's only point.

    Raises:
        SettingsError: there are several; the text says what to set.
    """
    if len(plan.points) == 1:
        return plan.points[0]
    asked = [settings(point.cfg) for point in plan.points]
    names = varying(asked)
    axes = [name for name in names if name in AXES]
    values = _several(asked, axes or names)
    raise SettingsError(
        f"profile takes one point, and this gives {len(plan.points)}; they differ in "
        + "; ".join(f"{name}={','.join(found)}" for name, found in values.items())
        + ". Give one value of each, as in "
        + " ".join(f"{name}={found[0]}" for name, found in values.items())
    )


def _several(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> dict[str, list[str]]:
    return {name: list(dict.fromkeys(as_written(row[name]) for row in rows)) for name in names}


def check(point: Point) -> None:
    """Raises SettingsError where this machine cannot profile the point, or it is not for one."""
    cfg = point.cfg
    if point.skip is not None:
        raise SettingsError(f"the point cannot run here: {point.skip}")
    if cfg["device"] != "cuda":
        raise SettingsError(f"device={cfg['device']}: nsys times a GPU's kernels")
    if cfg["measure"]["n_process"] > 1:
        raise SettingsError(
            f"measure.n_process={cfg['measure']['n_process']}: a profile is of one engine; give "
            "measure.n_process=1"
        )
    if cfg["tp"] > 1 and "collectives" not in cfg["instrument"]:
        raise SettingsError(
            "instrument.collectives=false: a profile takes from the other passes what a CUDA graph "
            "holds; give instrument.collectives=true"
        )
    if cfg["resume"] not in ("auto", "never"):
        raise SettingsError(f"resume={cfg['resume']}: a profile is a run of its own; leave it out")


def _nsys(target: Sequence[str]) -> Nsys:
    """The nsys to use; an error shows the command that it would have been."""
    from harness.machine.hardware import versions

    would = shlex.join(Nsys("nsys", "").profile(Path("report"), target))
    nvtx = versions()["nvtx"]
    if nvtx is None:
        raise NsysError(
            "the package nvtx is not installed, so there are no ranges: pip install nvtx"
        )
    try:
        nsys = find()
    except NsysError as error:
        raise NsysError(f"{error}\nIt would have run:\n{would}") from error
    deaf = deafness(nsys.version, nvtx)
    if deaf is not None:
        raise NsysError(f"{nsys.path}: {deaf}")
    return nsys


def _profile(nsys: Nsys, plan: Plan, point: Point, target: Sequence[str]) -> int:
    run = create(Path(point.cfg["results_dir"]), plan)
    run.close()  # the process that nsys starts takes it over
    folder = run.path / "points" / f"{point.point_id}-nsys"
    folder.mkdir()
    # The lock is held here, so that waiting for it takes nothing of what nsys may take.
    own = ["device_lock=off", f"resume={_quoted(run.path)}"]
    command = nsys.profile(folder / "report", [*target, *own])
    measure = point.cfg["measure"]
    limit_s = measure["startup_timeout_s"] + measure["point_timeout_s"] + REPORT_S
    say = partial(print, file=sys.stderr, flush=True)
    with held(devices_of([point]), point.cfg["device_lock"], str(run.path), say):
        say(f"nsys {nsys.version}: {shlex.join(command)}")
        _wait(command, limit_s)
    marker = read_marker(run.path / "points" / point.point_id)
    if marker is None or marker.status not in _USABLE:
        how = "did not end" if marker is None else f"ended as {marker.status}: {marker.reason}"
        raise NsysError(f"the point {how}; what there is of it is in {run.path}")
    report = report_of(folder / "report", nsys)
    sqlite = folder / "report.sqlite"
    done = subprocess.run(nsys.export(report, sqlite), capture_output=True, text=True)
    if done.returncode or not sqlite.is_file():
        said = (done.stderr + done.stdout).strip()[-500:]
        raise NsysError(
            f"nsys export failed with {done.returncode}: {said}; the report is {report}"
        )
    status = read_back(sqlite, stdout())
    made = {"run": str(run.path), "report": str(report), "sqlite": str(sqlite)}
    print(json.dumps(made, allow_nan=False))
    return status


def _wait(command: Sequence[str], limit_s: float) -> None:
    """Runs nsys to its end. An interrupt reaches it and the harness below it once, and both are
    waited for; in a session of its own a terminal does not send it to them a second time.

    Raises:
        NsysError: it had not ended after `limit_s`; nothing of it is left.
    """
    with interrupted_once():
        process = subprocess.Popen(command, start_new_session=True)
        try:
            process.wait(limit_s)
        except KeyboardInterrupt:
            os.killpg(process.pid, signal.SIGINT)
            process.wait()
            raise
        except subprocess.TimeoutExpired as late:
            os.killpg(process.pid, signal.SIGKILL)  # the engine ends with the process that has it
            process.wait()
            raise NsysError(
                f"nsys had not ended after {limit_s:g} s (measure.startup_timeout_s + "
                f"measure.point_timeout_s + {REPORT_S:g}) and was killed"
            ) from late


def _quoted(path: Path) -> str:
    """A path as a value of Hydra's, whatever is in it."""
    text = str(path).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'
