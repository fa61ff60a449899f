"""point.json, the mark of a point that has ended: its status and the hashes of its tables."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness.machine.fingerprint import digest, file_digest
from harness.tables.schema import STATUSES

KEPT = ("ok", "skipped", "contaminated")
"""Statuses that a continued run does not measure again."""
FAILED = ("error", "killed", "oom", "timeout")
_NAME = "point.json"


@dataclass(frozen=True)
class Marker:
    """How a point ended. `files` holds the hash of each table beside it; the file also holds a hash
    of all this, so that a damaged or edited one is found before it is trusted."""

    run_id: str
    point_id: str
    process: int
    status: str
    reason: str | None
    wall_s: float | None
    finished_at: str
    files: dict[str, str]


class DamagedError(ValueError):
    """A point's folder that is not as it was written; the text says in what."""


def write_marker(
    folder: Path,
    run_id: str,
    point_id: str,
    process: int,
    *,
    status: str,
    reason: str | None,
    wall_s: float | None,
) -> None:
    """Marks a folder whose tables are all there."""
    files = {path.name: file_digest(path) for path in sorted(folder.iterdir())}
    marker = asdict(Marker(run_id, point_id, process, status, reason, wall_s, now(), files))
    write_json(folder / _NAME, {**marker, "check": digest(marker, 16)})


def read_marker(folder: Path) -> Marker | None:
    """The marker of a finished point; None without one, or where `check_marker` finds damage."""
    try:
        return check_marker(folder)
    except DamagedError:
        return None


def check_marker(folder: Path) -> Marker:
    """The marker of a finished point, all of whose tables are as they were written.

    Raises:
        DamagedError: there is none, it is not as it was written, or a table is missing, differs
            from its hash or came later.
    """
    marker = _parsed(folder)
    for name, hashed in marker.files.items():
        try:
            found = file_digest(folder / name)
        except FileNotFoundError:
            raise DamagedError(f"{name} is missing") from None
        except (OSError, ValueError, TypeError) as error:
            raise DamagedError(f"{name} cannot be read ({error})") from error
        if found != hashed:
            raise DamagedError(f"{name} is not as it was written")
    for path in sorted(folder.glob("[!.]*.parquet")):
        if path.name not in marker.files:
            raise DamagedError(f"{path.name} was added")
    return marker


def _parsed(folder: Path) -> Marker:
    """What point.json says, if it is as it was written."""
    try:
        stored = json.loads((folder / _NAME).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DamagedError(f"it has no {_NAME}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedError(f"{_NAME} cannot be read ({error})") from error
    try:
        check = stored.pop("check")
        if digest(stored, 16) == check:
            marker = Marker(**stored)
            known = marker.status in STATUSES and isinstance(marker.point_id, str)
            if known and isinstance(marker.files, dict) and "points.parquet" in marker.files:
                return marker
    except (ValueError, TypeError, AttributeError, KeyError):
        pass
    raise DamagedError(f"{_NAME} is not as it was written")


def worst_status(statuses: Iterable[str]) -> str:
    """That of a point whose fresh engines ended in different ways."""
    return max(statuses, key=STATUSES.index)


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file in one step: a reader sees the old one, the new one or none."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            json.dump(value, file, indent=1, allow_nan=False)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def now() -> str:
    return datetime.now(UTC).isoformat()
