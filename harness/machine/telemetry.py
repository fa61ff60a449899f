"""Readings of the machine round a window: what its cores do, and its GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from harness.machine.nvml import Gpus, row


def read(when: str) -> list[dict[str, Any]]:
    """Rows of the telemetry table without their keys; a value that cannot be read is None and has a
    reason."""
    parts = [_cpu_rows, _gpu_rows]
    if when == "after":  # the energy counters of the GPUs are read right beside the window
        parts.reverse()
    return [one for part in parts for one in part(when)]


BUSY = "busy machine"
"""How the note of a point begins that was measured beside other work."""
BUSY_SHARE = 0.2
"""Of the cores, taken by other processes while the plain pass ran: above it a point is noted."""
BUSY_WALL_S = 0.5
"""Shorter windows say nothing: the kernel counts CPU time in ticks of 10 ms."""


def busy_note(windows: Iterable[tuple[float, list[dict[str, Any]]]]) -> str | None:
    """What other processes took of the cores during windows of (seconds, telemetry rows); None
    where it is at most BUSY_SHARE, or cannot be told."""
    wall_s = others_s = cores = 0.0
    for seconds, rows in windows:
        at = {(r["when"], r["name"]): r["value"] for r in rows if r["device"] == "cpu"}
        busy, own = _growth(at, "cpu_busy_s"), _growth(at, "cpu_own_s")
        found = at.get(("after", "cores"))
        if busy is None or own is None or found is None:
            return None
        wall_s, others_s, cores = wall_s + seconds, others_s + busy - own, found
    if wall_s < BUSY_WALL_S or others_s <= BUSY_SHARE * cores * wall_s:
        return None
    return (
        f"{BUSY}: other processes used {others_s / wall_s:.1f} of {cores:.0f} cores during the "
        "plain pass"
    )


def _growth(at: Mapping[tuple[str, str], float | None], name: str) -> float | None:
    before, after = at.get(("before", name)), at.get(("after", name))
    return None if before is None or after is None else after - before


Reading = tuple[str, str, float | None, str | None]  # name, unit, value, reason why it is None


def _gpu_rows(when: str) -> list[dict[str, Any]]:
    with Gpus() as gpus:
        return gpus.read(when)


def _cpu_rows(when: str) -> list[dict[str, Any]]:
    readings = (_load(), _cpu_clock(), _busy(), _own(), _cores())
    return [row(when, "cpu", *reading) for reading in readings]


def _load() -> Reading:
    try:
        return "load_1m", "1", os.getloadavg()[0], None
    except (OSError, AttributeError):
        return "load_1m", "1", None, "the system gives no load average"


def _cpu_clock() -> Reading:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    clocks = [float(line.split(":")[1]) for line in lines if line.startswith("cpu MHz")]
    if not clocks:
        return "clock_mhz", "MHz", None, "the system gives no clock of the CPU"
    return "clock_mhz", "MHz", sum(clocks) / len(clocks), None


def _cores() -> Reading:
    from harness.machine.hardware import cpu_cores

    return "cores", "1", float(cpu_cores()), None


def _busy() -> Reading:
    """CPU seconds of all processes on the cores that this one may use, those that a hypervisor
    gave to others included; interrupts, which also serve this process's own sockets, are not."""
    try:
        lines = Path("/proc/stat").read_text().splitlines()
        mine = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        fields = [line.split() for line in lines if line.split(" ", 1)[0] in mine]
        ticks = sum(int(f[at]) for f in fields for at in (1, 2, 3, 8))  # user, nice, system, steal
    except (OSError, ValueError, IndexError, AttributeError):
        ticks = 0
    if not ticks:
        return "cpu_busy_s", "s", None, "the system does not count the CPU time of its cores"
    return "cpu_busy_s", "s", ticks / os.sysconf("SC_CLK_TCK"), None


def _own() -> Reading:
    """CPU seconds of this process's session, which an engine and its ranks have to themselves."""
    session, ticks = os.getsid(0), 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except (OSError, IndexError):
            continue  # it has just ended
        if int(fields[3]) == session:
            ticks += int(fields[11]) + int(fields[12])
    if not ticks:
        return "cpu_own_s", "s", None, "the system does not count the CPU time of processes"
    return "cpu_own_s", "s", ticks / os.sysconf("SC_CLK_TCK"), None
