"""point.json, the mark of a point that has ended: its status and the hashes of its tables."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness.fingerprint import digest, file_digest
from harness.schema import STATUSES

KEPT = ("ok", "skipped", "contaminated")
"""Statuses that a continued run does not measure again."""
FAILED = ("error", "oom", "timeout")
_NAME = "point.json"


@dataclass(frozen=True)
class Marker:
    """How a point ended. `files` holds the hash of each table beside it; the file also holds a hash
    of all this, so that a damaged or edited one is found before it is trusted."""

    point_id: str
    process: int
    status: str
    reason: str | None
    wall_s: float | None
    finished_at: str
    files: dict[str, str]


def write_marker(
    folder: Path,
    point_id: str,
    process: int,
    *,
    status: str,
    reason: str | None,
    wall_s: float | None,
) -> None:
    """Marks a folder whose tables are all there."""
    files = {path.name: file_digest(path) for path in sorted(folder.iterdir())}
    marker = asdict(Marker(point_id, process, status, reason, wall_s, now(), files))
    write_json(folder / _NAME, {**marker, "check": digest(marker, 16)})


def read_marker(folder: Path) -> Marker | None:
    """The marker of a finished point; None without one, if it is not as it was written, or if a
    table differs from its hash."""
    try:
        stored = json.loads((folder / _NAME).read_text(encoding="utf-8"))
        check = stored.pop("check")
        if digest(stored, 16) != check:
            return None
        marker = Marker(**stored)
        whole = all(file_digest(folder / name) == hashed for name, hashed in marker.files.items())
    except (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError):
        return None
    known = marker.status in STATUSES and isinstance(marker.point_id, str)
    return marker if whole and known else None


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
