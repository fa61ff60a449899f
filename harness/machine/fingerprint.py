"""What a result depends on besides settings, as hashes: sources, checkpoint, machine."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

SOURCE_SUFFIXES = (".py", ".cu", ".cpp", ".h")


def digest(value: Any, length: int = 12) -> str:
    """The first `length` hex digits of the SHA-256 of a value's JSON with sorted keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def file_digest(path: Path) -> str:
    """SHA-256 of a file's content, 16 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def sources() -> str:
    """Hash of every source file of engine/ and harness/: names and contents."""
    harness = Path(__file__).resolve().parents[1]
    entries = [
        (path.relative_to(harness.parent).as_posix(), file_digest(path))
        for package in (harness.parent / "engine", harness)
        for path in sorted(package.rglob("*"))
        if path.suffix in SOURCE_SUFFIXES
    ]
    return digest(entries, 16)


def checkpoint(folder: Path) -> dict[str, Any]:
    """Identity of a model directory: its path, its config.json by content, its weight files by size
    and time of change (hashing 60 GB for every plan would take minutes)."""
    weights = sorted(folder.glob("*.safetensors"))
    config = folder / "config.json"
    return {
        "path": str(folder.resolve()),
        "config": file_digest(config) if config.is_file() else None,
        "weights": [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in weights],
    }


def surroundings() -> dict[str, Any]:
    """What every point's key holds besides its own settings: sources, versions, machine, driver."""
    from harness.machine.hardware import capture

    found = capture()
    return {
        "sources": sources(),
        "versions": found["versions"],
        "hardware": found["fingerprint"],
        "driver": found["driver"],
    }
