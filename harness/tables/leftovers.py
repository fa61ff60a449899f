"""What a run that is continued holds besides finished points: removed or set aside."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Collection
from pathlib import Path

from harness.tables.marker import DamagedError, Marker, check_marker
from harness.tables.storage import set_aside

_HALF_WRITTEN = re.compile(r"\.(tmp|old)-.")
_PROFILE = "-nsys"
"""How the folder of a point's profile ends; it stands beside those of points."""


def tidy(run: Path, names: Collection[str], run_id: str) -> list[str]:
    """Leaves finished points of this run and empty places for the others, and says what it found.

    What a command that was killed had half written is removed. Anything else that is not as this
    run wrote it (damaged, of another point or run, of no point of the plan, a file for a folder) is
    moved to `set-aside/`, and its point measured again.

    Args:
        run: a folder that this process has locked.
        names: the folders below `points/` that the plan can fill.
        run_id: whose points they must be.

    Raises:
        OSError: something can be neither removed nor moved.
    """
    notes = []

    def aside(path: Path, why: str) -> None:
        notes.append(f"{path}: {why}; it is now {set_aside(run, path)}")

    for name in ("points", "logs", "cache"):
        folder = run / name
        if os.path.lexists(folder) and not folder.is_dir():
            aside(folder, "no folder")
    shutil.rmtree(run / "cache", ignore_errors=True)
    for name in ("points", "logs"):
        (run / name).mkdir(exist_ok=True)
    if (run / "finished.json").exists() and not is_finished(run):
        aside(run / "finished.json", "it cannot be read")

    profiles = {name + _PROFILE for name in names}
    for path in sorted((run / "points").iterdir()):
        if _HALF_WRITTEN.match(path.name):
            _remove(path)
            notes.append(f"{path}: half-written by a command that was ended; removed")
        elif path.name.startswith(".") or path.name in profiles:
            continue
        elif path.name not in names:
            aside(path, "no point of this plan")
        else:
            try:
                own_marker(path, run_id)
            except DamagedError as error:
                aside(path, f"{error}, so it is measured again")
    return notes


def own_marker(folder: Path, run_id: str) -> Marker:
    """The marker of the finished point that the folder's name says, of this run.

    Raises:
        DamagedError: there is none; the text says what there is.
    """
    marker = check_marker(folder)
    if marker.run_id != run_id:
        raise DamagedError(f"it is of the run {marker.run_id}")
    name = marker.point_id + (f"-{marker.process}" if marker.process else "")
    if name != folder.name:
        raise DamagedError(f"it is of the point {name}")
    return marker


def is_finished(run: Path) -> bool:
    """Whether the run's finished.json says that every point has a row."""
    try:
        stored = json.loads((run / "finished.json").read_text(encoding="utf-8"))
        return isinstance(stored["counts"], dict)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def _remove(path: Path) -> None:
    """As far as it can: an engine that is about to end with its command may still write there, and
    what stays is seen by nobody and removed the next time."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
