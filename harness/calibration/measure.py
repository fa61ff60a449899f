"""Which parts are measured by whom, and what becomes of them in the file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from harness.calibration.crew import Crew
from harness.calibration.file import FAILED, SKIPPED, Calibration, path_of
from harness.calibration.parts import Curve, obstacle
from harness.machine.capabilities import Machine

CEILINGS = ("read", "matmul")
"""What a run needs for MBU and MFU."""
CEILINGS_S = 120.0

Ended = Callable[[str, "str | None", float], None]
"""(part, why it failed or None, seconds)"""


def ensure(cfg: Mapping[str, Any]) -> str | None:
    """Measures the ceilings that are not there yet, for a run of this configuration. -> why there
    are none; None if there are."""
    calibration = Calibration(path_of(cfg["results_dir"]))
    missing = calibration.missing(CEILINGS)
    unwritable = calibration.unwritable() if missing else None
    if unwritable is not None:
        return unwritable
    failures: list[str] = []

    def ended(name: str, reason: str | None, seconds: float) -> None:
        if reason is not None:
            failures.append(f"{name}: {reason}")

    if missing:
        calibrate(calibration, missing, Machine.probe(), ended, part_s=CEILINGS_S)
    return "; ".join(failures) or None


def calibrate(
    calibration: Calibration,
    names: Sequence[str],
    machine: Machine,
    ended: Ended = lambda name, reason, seconds: None,
    *,
    begins: Callable[[str], None] = lambda name: None,
    part_s: float = 300.0,
    crew_of: Callable[[str, str, float], Crew] | None = None,
) -> None:
    """Measures parts; each is in the file as soon as it has ended, whatever becomes of the others.

    Args:
        names: of parts that belong to one crew side by side, which then starts once.
        ended: of each part but those that this machine cannot measure, which the file alone says;
            begins: of the same ones, before.
        crew_of: (part, device, part_s) -> who measures it; `crew` if left out.
    """

    def report(name: str, replies: list[Any] | None, reason: str | None, seconds: float) -> None:
        if replies is None:
            calibration.put(name, status=FAILED, reason=reason, seconds=seconds)
        else:
            calibration.put(name, _rows(name, replies, machine.device), seconds=seconds)
        ended(name, reason, seconds)

    todo = []
    for name in names:
        reason = obstacle(name, machine)
        if reason is None:
            todo.append(name)
        else:
            calibration.put(name, status=SKIPPED, reason=reason)
    for who, parts in groupby(todo, lambda n: (crew_of or crew)(n, machine.device, part_s)):
        who.measure(list(parts), report, begins)


def crew(name: str, device: str, part_s: float) -> Crew:
    """Who measures a part."""
    if "/" not in name:
        from harness.calibration.device import DeviceMeter

        return Crew(1, None, device, DeviceMeter, part_s)
    from harness.calibration.collectives import CollectiveMeter

    curve = Curve.named(name)
    return Crew(curve.world, curve.path, device, CollectiveMeter, part_s)


def _rows(name: str, replies: list[Any], device: str) -> list[dict[str, Any]]:
    if "/" not in name:
        rows: list[dict[str, Any]] = replies[0]
        return rows
    from harness.calibration.collectives import rows as joined

    return joined(name, replies, device)
