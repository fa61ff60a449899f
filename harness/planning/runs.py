"""Run folders: made exclusively, locked while in use, resumable point by point.

results/runs/<experiment>-<UTC time>-<random>/
    lock            held (flock) by the process that writes here; the kernel frees it with it
    plan.json       the points, their keys and configurations
    points/<id>/    one point's tables and its point.json; renamed into place when it has ended
    logs/           what the engines printed
    set-aside/      what was found here and is not of the run
    finished.json   written when every point of the plan has a row, and the tables are printed
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness.planning.plan import Plan, Point
from harness.settings.config import SettingsError
from harness.tables.leftovers import is_finished, own_marker, tidy
from harness.tables.marker import (
    DamagedError,
    Marker,
    now,
    read_marker,
    worst_status,
    write_json,
    write_marker,
)
from harness.tables.storage import set_aside, try_lock


class RunFolder:
    """One run that this process has locked.

    Attributes:
        path: the folder.
        plan: what it holds the results of.
        continued: it existed before.
        notes: what was found that is not as it should be, and what became of it; a line each.
    """

    def __init__(self, path: Path, plan: Plan, lock: int, continued: bool) -> None:
        self.path = path
        self.plan = plan
        self.continued = continued
        self.notes: list[str] = []
        self._made_as = path.name
        if continued and (stored := read_plan(path)):
            self._made_as = stored.get("run_id", path.name)  # it may have been renamed
        self._lock: int | None = lock
        self._lost: set[str] = set()
        if self.continued:
            self.notes += tidy(path, folder_names(plan), self._made_as)

    @property
    def run_id(self) -> str:
        return self.path.name

    def marker(self, point: Point, process: int = 0) -> Marker | None:
        """How the point ended, or None if it has not, or if what it left is damaged or foreign."""
        try:
            return own_marker(self.path / "points" / folder_name(point, process), self._made_as)
        except DamagedError:
            return None

    def begin(self, point: Point, process: int = 0) -> Path:
        """An empty folder for the point's tables; a reader of the run does not see it."""
        out = self._partial(point, process)
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        return out

    def _partial(self, point: Point, process: int) -> Path:
        return self.path / "points" / f".tmp-{folder_name(point, process)}-{os.getpid()}"

    def finish(
        self,
        point: Point,
        process: int,
        out: Path,
        *,
        status: str,
        reason: str | None,
        wall_s: float | None,
    ) -> None:
        """Marks the folder of `begin` as whole and moves it into place in one step."""
        write_marker(
            out, self._made_as, point.point_id, process,
            status=status, reason=reason, wall_s=wall_s,
        )  # fmt: skip
        target = self.path / "points" / folder_name(point, process)
        if os.path.lexists(target) and self.marker(point, process) is None:
            self.notes.append(
                f"{target}: not as this run wrote it; it is now {set_aside(self.path, target)}"
            )
        if target.exists():
            stale = out.with_name(f".old-{target.name}")
            target.rename(stale)
            out.rename(target)
            shutil.rmtree(stale, ignore_errors=True)
        else:
            out.rename(target)

    def lose(self, point: Point, process: int) -> None:
        """The point's files cannot be written: it counts as an error of this process, and whoever
        continues the run measures it again."""
        self._lost.add(point.point_id)
        shutil.rmtree(self._partial(point, process), ignore_errors=True)

    def counts(self) -> dict[str, int]:
        """Points by status, all processes of a point counted once with their worst status."""
        found = dict.fromkeys(self._lost, "error")
        planned = {point.point_id for point in self.plan.points}
        for path in sorted((self.path / "points").glob("[!.]*")):
            marker = read_marker(path)
            if marker is not None and marker.point_id in planned:
                before = found.get(marker.point_id, marker.status)
                found[marker.point_id] = worst_status((before, marker.status))
        return dict(Counter(found.values()))

    def mark_finished(self) -> None:
        """Every point of the plan has a row."""
        write_json(self.path / "finished.json", {"finished_at": now(), "counts": self.counts()})

    def close(self) -> None:
        """Gives the lock back; repeatable."""
        shutil.rmtree(self.path / "cache", ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def open_run(results_dir: Path, plan: Plan, resume: str) -> RunFolder:
    """The folder in which a plan runs: `auto` continues the newest unfinished run of the same plan
    that no other process holds, else makes a new one; `never` makes a new one; anything else names
    a run (a folder in `results_dir`, or a path), finished or not.

    Raises:
        SettingsError: the named run does not exist, is of another plan, is in use, or cannot be
            read; the folder cannot be made.
    """
    try:
        return _open(results_dir, plan, resume)
    except OSError as error:
        raise SettingsError(
            f"results_dir={results_dir}: no run can be kept there ({error.strerror or error}: "
            f"{error.filename or results_dir}); name a folder that can be made and written"
        ) from error


def _open(results_dir: Path, plan: Plan, resume: str) -> RunFolder:
    if resume == "never":
        return create(results_dir, plan)
    if resume != "auto":
        return _reopen_named(results_dir, plan, resume)
    notes: list[str] = []
    for _, path in sorted(_same_plan(results_dir, plan, notes), reverse=True):
        try:
            lock = try_lock(path)
            if lock is None:
                continue
            if not is_finished(path):  # asked after locking: it may just have ended
                run = RunFolder(path, plan, lock, continued=True)
                break
            os.close(lock)
        except OSError as error:
            notes.append(f"{path}: of this plan, but it cannot be continued ({error.strerror})")
    else:
        run = create(results_dir, plan)
    run.notes[:0] = notes
    return run


def create(results_dir: Path, plan: Plan) -> RunFolder:
    """A new run folder that no other process can have."""
    path = new_folder(results_dir, plan.experiment)
    lock = None
    try:
        lock = try_lock(path)
        assert lock is not None, "a folder made a moment ago is locked"
        (path / "points").mkdir()
        (path / "logs").mkdir()
        written = {"created_at": now(), "run_id": path.name, **plan.as_dict()}
        write_json(path / "plan.json", written)
    except OSError:
        shutil.rmtree(path, ignore_errors=True)
        if lock is not None:
            os.close(lock)
        raise
    return RunFolder(path, plan, lock, continued=False)


def _prefix(experiment: str) -> str:
    """How the names of the experiment's runs begin."""
    return re.sub(r"[^A-Za-z0-9_.]+", "-", experiment)


def new_folder(results_dir: Path, experiment: str) -> Path:
    """An empty folder named after an experiment and the time, made by this process alone."""
    results_dir.mkdir(parents=True, exist_ok=True)
    while True:
        time = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        path = results_dir / f"{_prefix(experiment)}-{time}-{secrets.token_hex(3)}"
        try:
            path.mkdir()
            return path
        except FileExistsError:
            continue


def folder_name(point: Point, process: int) -> str:
    """Name of the folder of a point as measured by its n-th fresh engine."""
    return point.point_id if process == 0 else f"{point.point_id}-{process}"


def folder_names(plan: Plan) -> list[str]:
    """Of every point and fresh engine of the plan."""
    return [
        folder_name(point, process)
        for point in plan.points
        for process in range(int(point.cfg["measure"]["n_process"]))
    ]


def _reopen_named(results_dir: Path, plan: Plan, name: str) -> RunFolder:
    path = next((p for p in (results_dir / name, Path(name)) if (p / "plan.json").is_file()), None)
    if path is None:
        raise SettingsError(
            f"resume={name}: no such run in {results_dir}, and no path of one; give its folder, or "
            "auto or never"
        )
    stored = read_plan(path)
    if stored is None:
        raise SettingsError(
            f"resume={name}: its plan.json is damaged, so nobody knows what it holds; start a new "
            "one with resume=never"
        )
    if stored["key"] != plan.key:
        raise SettingsError(
            f"resume={name}: that run is of another plan: {_what_differs(stored, plan)}"
        )
    lock = try_lock(path)
    if lock is None:
        raise SettingsError(f"resume={name}: another process is running it")
    run = RunFolder(path, plan, lock, continued=True)
    (path / "finished.json").unlink(missing_ok=True)
    return run


def _what_differs(stored: dict[str, Any], plan: Plan) -> str:
    then, now = stored["surroundings"], plan.surroundings
    changed = [name for name in now if then.get(name) != now[name]]
    if changed:
        return f"{', '.join(changed)} changed since; start a new one with resume=never"
    before, after = {p["point_id"] for p in stored["points"]}, {p.point_id for p in plan.points}
    if before == after:
        return "the same points in another order, or others of them are skipped now"
    return (
        f"{len(after - before)} of {len(after)} points are not in it, and {len(before - after)} of "
        "its points are not asked for; give the settings it was started with"
    )


def _same_plan(results_dir: Path, plan: Plan, notes: list[str]) -> list[tuple[str, Path]]:
    """(time of creation, folder) of the runs with the plan's key; what is no run is passed over,
    and named in the notes where it has the name of a run of this experiment."""
    found = []
    for file in sorted(results_dir.glob("*/plan.json")):
        stored = read_plan(file.parent)
        if stored is None and file.parent.name.startswith(f"{_prefix(plan.experiment)}-"):
            notes.append(f"{file} cannot be read, so nothing in its folder is used")
        if stored is not None and stored["key"] == plan.key:
            found.append((stored["created_at"], file.parent))
    return found


def read_plan(folder: Path) -> dict[str, Any] | None:
    """plan.json of a run; None if it is not one."""
    try:
        stored = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
        types = {"created_at": str, "key": str, "surroundings": dict, "points": list}
        whole = all(isinstance(stored[name], kind) for name, kind in types.items())
        whole = whole and all(isinstance(point["point_id"], str) for point in stored["points"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return stored if whole else None
