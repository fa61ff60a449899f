"""Run folders: made exclusively, locked while in use, resumable point by point.

results/runs/<experiment>-<UTC time>-<random>/
    lock            held (flock) by the process that writes here; the kernel frees it with it
    plan.json       the points, their keys and configurations
    points/<id>/    one point's tables and its point.json; renamed into place when it has ended
    logs/           what the engines printed
    finished.json   written when every point of the plan has a row
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness.config import SettingsError
from harness.fingerprint import file_digest
from harness.plan import Plan, Point
from harness.schema import STATUSES

KEPT = ("ok", "skipped", "contaminated")
"""Statuses that a continued run does not measure again."""
FAILED = ("error", "oom", "timeout")


def worst_status(statuses: Iterable[str]) -> str:
    """That of a point whose fresh engines ended in different ways."""
    return max(statuses, key=STATUSES.index)


@dataclass(frozen=True)
class Marker:
    """point.json: how a point ended. `files` holds the hash of each table beside it, so that a
    damaged one is found before it is trusted."""

    point_id: str
    process: int
    status: str
    reason: str | None
    wall_s: float | None
    finished_at: str
    files: dict[str, str] = field(default_factory=dict)


class RunFolder:
    """One run that this process has locked.

    Attributes:
        path: the folder.
        plan: what it holds the results of.
        continued: it existed before.
    """

    def __init__(self, path: Path, plan: Plan, lock: int, continued: bool) -> None:
        self.path = path
        self.plan = plan
        self.continued = continued
        self._lock: int | None = lock
        for leftover in (*path.glob("points/.*"), path / "cache"):
            shutil.rmtree(leftover, ignore_errors=True)

    @property
    def run_id(self) -> str:
        return self.path.name

    def marker(self, point: Point, process: int = 0) -> Marker | None:
        """How the point ended, or None if it has not, or if what it left cannot be read."""
        return read_marker(self.path / "points" / folder_name(point, process))

    def begin(self, point: Point, process: int = 0) -> Path:
        """An empty folder for the point's tables; a reader of the run does not see it."""
        out = self.path / "points" / f".tmp-{folder_name(point, process)}-{os.getpid()}"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        return out

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
        files = {path.name: file_digest(path) for path in sorted(out.iterdir())}
        marker = Marker(point.point_id, process, status, reason, wall_s, _now(), files)
        write_json(out / "point.json", asdict(marker))
        target = self.path / "points" / folder_name(point, process)
        if target.exists():
            stale = out.with_name(f".old-{target.name}")
            target.rename(stale)
            out.rename(target)
            shutil.rmtree(stale, ignore_errors=True)
        else:
            out.rename(target)

    def counts(self) -> dict[str, int]:
        """Points by status, all processes of a point counted once with their worst status."""
        found: dict[str, str] = {}
        for path in sorted((self.path / "points").glob("[!.]*")):
            marker = read_marker(path)
            if marker is not None:
                before = found.get(marker.point_id, marker.status)
                found[marker.point_id] = worst_status((before, marker.status))
        return dict(Counter(found.values()))

    def mark_finished(self) -> None:
        """Every point of the plan has a row."""
        write_json(self.path / "finished.json", {"finished_at": _now(), "counts": self.counts()})

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
        SettingsError: the named run does not exist, is of another plan, or is in use.
    """
    if resume == "never":
        return create(results_dir, plan)
    if resume != "auto":
        return _reopen_named(results_dir, plan, resume)
    for _, path in sorted(_same_plan(results_dir, plan), reverse=True):
        lock = _try_lock(path)
        if lock is None:
            continue
        if not (path / "finished.json").exists():  # asked after locking: it may just have ended
            return RunFolder(path, plan, lock, continued=True)
        os.close(lock)
    return create(results_dir, plan)


def create(results_dir: Path, plan: Plan) -> RunFolder:
    """A new run folder that no other process can have."""
    results_dir.mkdir(parents=True, exist_ok=True)
    experiment = re.sub(r"[^A-Za-z0-9_.]+", "-", plan.experiment)
    while True:
        time = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        path = results_dir / f"{experiment}-{time}-{secrets.token_hex(3)}"
        try:
            path.mkdir()
            break
        except FileExistsError:
            continue
    lock = _try_lock(path)
    assert lock is not None, "a folder made a moment ago is locked"
    (path / "points").mkdir()
    (path / "logs").mkdir()
    write_json(path / "plan.json", {"created_at": _now(), **plan.as_dict()})
    return RunFolder(path, plan, lock, continued=False)


def folder_name(point: Point, process: int) -> str:
    """Name of the folder of a point as measured by its n-th fresh engine."""
    return point.point_id if process == 0 else f"{point.point_id}-{process}"


def read_marker(folder: Path) -> Marker | None:
    """point.json of a finished point; None without one, or if a table differs from its hash."""
    try:
        marker = Marker(**json.loads((folder / "point.json").read_text(encoding="utf-8")))
        whole = all(file_digest(folder / name) == digest for name, digest in marker.files.items())
    except (OSError, ValueError, TypeError):
        return None
    return marker if whole else None


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file in one step: a reader sees the old one, the new one or none."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)


def _reopen_named(results_dir: Path, plan: Plan, name: str) -> RunFolder:
    path = next((p for p in (results_dir / name, Path(name)) if (p / "plan.json").is_file()), None)
    if path is None:
        raise SettingsError(
            f"resume={name}: no such run in {results_dir}, and no path of one; give its folder, or "
            "auto or never"
        )
    stored = json.loads((path / "plan.json").read_text(encoding="utf-8"))
    if stored["key"] != plan.key:
        raise SettingsError(
            f"resume={name}: that run is of another plan: {_what_differs(stored, plan)}"
        )
    lock = _try_lock(path)
    if lock is None:
        raise SettingsError(f"resume={name}: another process is running it")
    (path / "finished.json").unlink(missing_ok=True)
    return RunFolder(path, plan, lock, continued=True)


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


def _same_plan(results_dir: Path, plan: Plan) -> list[tuple[str, Path]]:
    """(time of creation, folder) of the runs with the plan's key."""
    found = []
    for file in results_dir.glob("*/plan.json"):
        try:
            stored = json.loads(file.read_text(encoding="utf-8"))
            if stored["key"] == plan.key:
                found.append((str(stored["created_at"]), file.parent))
        except (OSError, ValueError, KeyError):
            continue
    return found


def _try_lock(path: Path) -> int | None:
    """A file descriptor that holds the folder's lock, or None if another process does."""
    descriptor = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _now() -> str:
    return datetime.now(UTC).isoformat()
