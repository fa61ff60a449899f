"""The file of a machine's calibration: hardware/<fingerprint>.json beside the runs' folder."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.tables.storage import storing

if TYPE_CHECKING:
    from harness.measuring.roofline import Ceilings

VERSION = 1
_MACHINE = ("fingerprint", "cpu", "cpu_cores", "memory_bytes", "gpus", "driver", "os")
OK, FAILED, SKIPPED = "ok", "error", "skipped"

Part = dict[str, Any]
"""status (of the three), reason (why it is not ok), measured_at, seconds, conditions and state (as
below), rows."""


def path_of(results_dir: str | Path, fingerprint: str | None = None) -> Path:
    """Where a machine's calibration stands for runs in `results_dir`; this machine's by default."""
    from harness.machine.hardware import fingerprint as own

    return Path(results_dir).parent / "hardware" / f"{fingerprint or own()}.json"


def ceilings(results_dir: str | Path) -> Ceilings | None:
    """This machine's read bandwidth and matmul rate; None where they were not measured."""
    from harness.measuring.roofline import Ceilings

    found = Calibration(path_of(results_dir))
    read, matmul = found.figure("read_bytes_s"), found.figure("matmul_flops_s")
    return None if read is None or matmul is None else Ceilings(read, matmul)


class Calibration:
    """The parts that a file holds. One that is missing, no JSON or of another version holds none:
    everything in it can be measured again."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def parts(self) -> dict[str, Part]:
        return dict(self._read().get("parts", {}))

    def _read(self) -> dict[str, Any]:
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        usable = isinstance(found, dict) and found.get("version") == VERSION
        return found if usable else {}

    def missing(self, names: Sequence[str]) -> list[str]:
        """Those of `names` that are not there, or were measured with other software."""
        parts, now = self.parts, conditions()
        return [
            name
            for name in names
            if parts.get(name, {}).get("status") != OK or parts[name]["conditions"] != now
        ]

    def unwritable(self) -> str | None:
        """Why the file cannot be written, asked before hours of measuring; None if it can."""
        folder = self.path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return None
        except OSError as error:
            return (
                f"calibrations stand in {folder}, beside the runs' folder, and it cannot be "
                f"written ({error.strerror or error}); name another results folder"
            )

    def put(
        self,
        name: str,
        rows: Sequence[Mapping[str, Any]] = (),
        *,
        status: str = OK,
        reason: str | None = None,
        seconds: float | None = None,
    ) -> None:
        """Adds a part, in the place of an earlier one, and writes the file whole. A part that is
        not ok never takes the place of one that is.

        Raises:
            StorageError: it cannot be written, for instance since the disk is full.
        """
        from harness.machine.hardware import capture
        from harness.tables.plain import jsonable

        assert (status == OK) == (reason is None), (name, status, reason)
        found = self._read() or {"version": VERSION, "machine": {}, "parts": {}}
        if status != OK and found["parts"].get(name, {}).get("status") == OK:
            return
        machine = capture()
        found["machine"] = {key: machine[key] for key in _MACHINE}
        found["parts"][name] = {
            "status": status,
            "reason": reason,
            "measured_at": datetime.now(UTC),
            "seconds": seconds,
            "conditions": conditions(),
            "state": state() if rows else {},
            "rows": list(rows),
        }
        partial = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        text = json.dumps(jsonable(found), indent=1, allow_nan=False)
        with storing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(text + "\n", encoding="utf-8")
            partial.replace(self.path)

    def row(self, name: str) -> dict[str, Any] | None:
        """The row of a figure such as read_bytes_s."""
        rows = (row for part in self.parts.values() for row in part["rows"])
        return next((row for row in rows if row.get("name") == name), None)

    def figure(self, name: str) -> float | None:
        row = self.row(name)
        return None if row is None else row["value"]

    @property
    def memory_bytes(self) -> int | None:
        """Of one GPU of the machine; None without one."""
        gpus = self._read().get("machine", {}).get("gpus") or []
        return min((gpu["memory_bytes"] for gpu in gpus), default=None)

    def curve_rows(self) -> list[dict[str, Any]]:
        """Rows of the collectives' parts: kind, path, world, mode, bytes, times."""
        return [row for part in self.parts.values() for row in part["rows"] if "bytes" in row]


def state() -> dict[str, float | None]:
    """The machine right behind a part: load, clocks, temperatures, processes on its GPUs."""
    from harness.machine.telemetry import read

    return {f"{row['device']}.{row['name']}": row["value"] for row in read("after")}


def conditions() -> dict[str, Any]:
    """What figures depend on beside the machine: versions, and what NCCL is told."""
    from harness.machine.hardware import environment_variables, versions

    found: dict[str, Any] = {k: versions()[k] for k in ("torch", "triton", "nccl")}
    nccl = {k: v for k, v in environment_variables().items() if k.startswith("NCCL_")}
    found["env"] = {k: v for k, v in nccl.items() if not k.startswith("NCCL_DEBUG")}
    return found
