"""The folder of a fan-out: its jobs, how each ended, and the run folders below them

results/runs/<experiment>-<UTC time>-<random>/
    lock            held (flock) by the process that has submitted the jobs and waits for them
    jobs.json       the configurations of each job
    job-000/        lock (held by the job), begun, ended.json (it ended by itself), output.log (what
                    it printed), run folders
    finished.json   every job ended by itself, and every point has a row
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.machine.capabilities import torchrun_processes
from harness.machine.fingerprint import digest, sources
from harness.machine.hardware import versions
from harness.planning.plan import ENGINE_FIELDS, Plan, Point, fill_max_num_seqs
from harness.planning.runs import RunFolder, new_folder, read_plan
from harness.settings.config import ENGINE_AXES, FIXED_BATCH, SettingsError
from harness.settings.naming import named, settings, varying
from harness.settings.skip_rules import skip_rule
from harness.settings.validation import validate
from harness.sweep.worker import Functions
from harness.tables.fan_outs import JOBS, runs_below, runs_of, that_counts
from harness.tables.marker import now, write_json
from harness.tables.storage import try_lock

BEGUN, ENDED, OUTPUT = "begun", "ended.json", "output.log"


@dataclass(frozen=True)
class Job:
    """The points of one engine.

    Attributes:
        folder: of the job; its name is the job's.
        configs: composed configurations, in the order of the axes.
    """

    folder: Path
    configs: list[dict[str, Any]]

    @property
    def status(self) -> int | None:
        """Its exit status; None if it has not ended by itself."""
        try:
            ended = json.loads((self.folder / ENDED).read_text(encoding="utf-8"))
            return int(ended["status"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    @property
    def ended_ns(self) -> int | None:
        """When its last attempt ended, by the file system; None if none has, or one runs."""
        try:
            return (self.folder / ENDED).stat().st_mtime_ns
        except OSError:
            return None

    @property
    def begun(self) -> bool:
        return (self.folder / BEGUN).exists()

    @property
    def running(self) -> bool:
        """Whether a process holds the job."""
        if not self.begun:
            return False
        lock = try_lock(self.folder)
        if lock is not None:
            os.close(lock)
        return lock is None

    @property
    def runs(self) -> list[Path]:
        """Its run folders; more than one where it was continued on another kind of machine."""
        return runs_of(self.folder)

    def begin(self) -> None:
        (self.folder / ENDED).unlink(missing_ok=True)  # of an earlier attempt
        (self.folder / BEGUN).touch()

    def end(self, status: int) -> None:
        write_json(self.folder / ENDED, {"status": status, "ended_at": now()})


class FanOut:
    """A fan-out that this process has locked.

    Attributes:
        path: the folder.
        jobs: in the order of the axes.
        continued: it existed before.
    """

    def __init__(self, path: Path, jobs: list[Job], lock: int, continued: bool) -> None:
        self.path = path
        self.jobs = jobs
        self.continued = continued
        self._lock: int | None = lock

    @property
    def points(self) -> int:
        """Points as the jobs have planned them; of one that has not, its configurations."""
        return sum(_planned(job) for job in self.jobs)

    @property
    def runs(self) -> list[Path]:
        """The run of each job that counts."""
        return runs_below(self.path)

    def mark_finished(self) -> None:
        write_json(self.path / "finished.json", {"finished_at": now()})

    def close(self) -> None:
        """Gives the lock back; repeatable."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def open_fan_out(configs: Sequence[dict[str, Any]], functions: Functions) -> FanOut:
    """The folder in which a sweep fans out: with resume=auto the newest unfinished one of the same
    configurations, sources and versions that no other process holds, else a new one.

    Raises:
        SettingsError: resume names a run; the folder cannot be made.
    """
    results_dir, resume = Path(configs[0]["results_dir"]), configs[0]["resume"]
    if resume not in ("auto", "never"):
        raise SettingsError(
            f"resume={resume}: with a launcher give auto, which continues the newest unfinished "
            "fan-out of the same sweep, or never"
        )
    groups = _with_limits(by_engine(configs))
    key = digest([groups, sources(), versions()])
    try:
        found = None if resume == "never" else _unfinished(results_dir, key)
        return found or _create(results_dir, groups, key, functions)
    except OSError as error:
        raise SettingsError(
            f"results_dir={results_dir}: no fan-out can be kept there ({error.strerror}); name a "
            "folder that can be written, on this machine and on those of the jobs"
        ) from error


def by_engine(configs: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Configurations grouped by what their engine is started with, in the order of appearance."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for cfg in configs:
        groups.setdefault(digest([cfg[name] for name in ENGINE_FIELDS]), []).append(cfg)
    return list(groups.values())


def _with_limits(groups: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    """The groups with engine.max_num_seqs as one plan of all would fill it: a job sees its own
    points alone. A point that a rule leaves out and whose batch is larger stays as it is."""
    filled = [[copy.deepcopy(cfg) for cfg in group] for group in groups]
    fixed = [cfg for group in filled for cfg in group if cfg["workload"]["kind"] in FIXED_BATCH]
    asked = [cfg["engine"]["max_num_seqs"] for cfg in fixed]
    fill_max_num_seqs(fixed, [skip_rule(cfg) for cfg in fixed])
    for cfg, before in zip(fixed, asked, strict=True):
        if cfg["batch"] > cfg["engine"]["max_num_seqs"]:
            cfg["engine"]["max_num_seqs"] = before
    return filled


def check_jobs(configs: Sequence[dict[str, Any]], launcher: str) -> None:
    """Raises:
    SettingsError: a setting that no machine could run, or that no job can have.
    """
    if torchrun_processes():
        raise SettingsError(
            f"hydra/launcher={launcher} under torchrun: a job cannot have ranks on the nodes of "
            "another command; start one or the other (docs/cluster.md)"
        )
    for cfg in configs:
        validate(cfg)
        if cfg["device"] == "auto":
            raise SettingsError(
                f"device=auto with hydra/launcher={launcher}: a job that is given no GPU would "
                "time its CPU; give device=cuda or device=cpu"
            )


def list_jobs(configs: Sequence[dict[str, Any]], launcher: str, submit: Any) -> int:
    """Prints the jobs that a run would submit; which points can run is known where they run.

    Raises:
        SettingsError: what a run would refuse.
    """
    check_jobs(configs, launcher)
    groups = by_engine(configs)
    asked = [settings(group[0]) for group in groups]
    further = [name for name in varying(asked) if name.partition(".")[0] in ENGINE_FIELDS]
    names = dict.fromkeys([*further, *ENGINE_AXES])
    for number, (group, one) in enumerate(zip(groups, asked, strict=True)):
        print(f"job-{number:03}  {len(group)} points  {named(one, names)}")
    print(f"{len(configs)} points in {len(groups)} jobs by {launcher}")
    return 0


def read_job(folder: Path) -> tuple[Job, Functions]:
    """A job by its folder, as a process of its own finds it."""
    stored = json.loads((folder.parent / JOBS).read_text(encoding="utf-8"))
    return Job(folder, stored["jobs"][folder.name]), Functions(**stored["functions"])


def reopen(path: Path) -> RunFolder | None:
    """A run by its folder alone, to add to it; None if its plan is damaged or it is in use."""
    stored = read_plan(path)
    lock = try_lock(path) if stored is not None else None
    if stored is None or lock is None:
        return None
    points = tuple(Point(**point) for point in stored["points"])
    plan = Plan(stored["experiment"], stored["key"], points, stored["surroundings"])
    return RunFolder(path, plan, lock, continued=True)


def _create(
    results_dir: Path, groups: list[list[dict[str, Any]]], key: str, functions: Functions
) -> FanOut:
    path = new_folder(results_dir, str(groups[0][0]["experiment"] or "adhoc")).absolute()
    lock = try_lock(path)
    assert lock is not None, "a folder made a moment ago is locked"
    jobs = {f"job-{number:03}": group for number, group in enumerate(groups)}
    stored = {"created_at": now(), "key": key, "functions": asdict(functions), "jobs": jobs}
    for name in jobs:
        (path / name).mkdir()
    write_json(path / JOBS, stored)
    return FanOut(path, [Job(path / name, group) for name, group in jobs.items()], lock, False)


def _unfinished(results_dir: Path, key: str) -> FanOut | None:
    found = []
    for file in results_dir.glob(f"*/{JOBS}"):
        try:
            stored = json.loads(file.read_text(encoding="utf-8"))
            one = (str(stored["created_at"]), file.parent.absolute(), dict(stored["jobs"]))
            if stored["key"] == key and not (file.parent / "finished.json").exists():
                found.append(one)
        except (OSError, ValueError, KeyError, TypeError):
            continue  # another's
    for _, path, jobs in sorted(found, key=lambda one: one[0], reverse=True):
        lock = try_lock(path)
        if lock is not None:
            return FanOut(
                path, [Job(path / name, group) for name, group in jobs.items()], lock, True
            )
    return None


def _planned(job: Job) -> int:
    for run in that_counts(job.folder):
        if stored := read_plan(run):
            return len(stored["points"])
    return len(job.configs)
