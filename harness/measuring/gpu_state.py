"""What an engine's GPUs did during a window: clock, power, throttling, energy, company."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.machine.nvml import LIMITS

if TYPE_CHECKING:
    from harness.measuring.window import Window

THROTTLED, SHARED = "throttled", "shared GPU"
"""How the notes of a point begin whose GPUs were held back, or had other work beside it."""
ENERGY_S = 2.0
"""Of a shorter window the energy is null: boards average their power over up to a second."""

Rows = Sequence[Mapping[str, Any]]


def of_engine(effective: Mapping[str, Any]) -> list[str]:
    """The telemetry's names of an engine's GPUs: rank r has the r-th visible one; none on a CPU."""
    from harness.machine.hardware import gpus

    if effective.get("device") != "cuda":
        return []
    return [f"gpu{card['index']}" for card in gpus()[: int(effective["tp"])]]


def columns(window: Window, devices: Sequence[str]) -> dict[str, Any]:
    """What a repeat adds to its row of `points`; None where it was not read."""
    rows = _of(window, devices)
    clocks = [float(np.median(of)) for of in _by_gpu(rows, "sm_clock_mhz").values()]
    power = [float(np.mean(of)) for of in _by_gpu(rows, "power_w").values()]
    temperatures = [one["value"] for one in _values(rows, "temperature_c")]
    limits = _limits(rows)
    shares = {name: share for share, name in _throttling(limits, len(_instants(rows)))}
    held = {at for at, _, _ in limits}
    return {
        "sm_clock_mhz": min(clocks, default=None),
        "power_w": sum(power) if len(power) == len(devices) > 0 else None,
        "temperature_c": max(temperatures, default=None),
        "throttled": len(held) / len(_instants(rows)) if _instants(rows) else None,
        "throttle_reasons": ", ".join(sorted({name for _, name in shares})) or None,
        "gpu_others": others(window, devices),
    }


def notes(windows: Sequence[Window], devices: Sequence[str]) -> list[str]:
    """What a reader must know of the GPUs during these windows."""
    found = []
    per_window = [_of(window, devices) for window in windows]
    instants = sum(len(_instants(rows)) for rows in per_window)
    limits = [limit for rows in per_window for limit in _limits(rows)]
    for share, (device, name) in _throttling(limits, instants):
        found.append(f"{THROTTLED}: {name} on {device} in {share:.0%} of the samples")
    most = max((n for w in windows if (n := others(w, devices)) is not None), default=None)
    if most:
        found.append(f"{SHARED}: {most} other compute processes beside the engine on one of them")
    if devices and most is None:
        found.append("whether others computed on the GPUs cannot be told: the driver does not list "
                     "the engine's own processes")  # fmt: skip
    return found


def others(window: Window, devices: Sequence[str]) -> int | None:
    """Most compute processes of others on one of the GPUs, before and after the window. None where
    the driver does not even list the engine's own there, as in some containers."""
    counts = []
    for device in devices:
        for when in ("before", "after"):
            at = {
                one["name"]: one["value"]
                for one in window.telemetry
                if (one["device"], one["when"]) == (device, when)
            }
            if not at.get("own_processes") or at.get("other_processes") is None:
                return None
            counts.append(int(at["other_processes"]))
    return max(counts, default=None)


def energy_j(window: Window, devices: Sequence[str]) -> tuple[float | None, str, str | None]:
    """(joules of the window, what was read, why there are none) of the GPUs together: the boards'
    energy counters, or the integral of the sampled power where a board has none."""
    if not devices:
        return None, "host", "no GPU whose power can be read"
    if window.wall_s < ENERGY_S:
        reason = f"the window took {window.wall_s:.2f} s; power is averaged, {ENERGY_S:g} s needed"
        return None, "nvml_energy", reason
    counted = [_counted(window, device) for device in devices]
    known = [joules for joules in counted if joules is not None]
    if len(known) == len(devices):
        return sum(known), "nvml_energy", None
    integrals = [_integral(window, device) for device in devices]
    known = [joules for joules in integrals if joules is not None]
    if len(known) == len(devices):
        return sum(known), "nvml_power", None
    rows = [one for one in _of(window, devices) if one["name"] == "power_w"]
    why = next((str(one["reason"]) for one in rows if one["reason"]), "no sample was taken")
    return None, "nvml_power", f"neither energy nor power can be read: {why}"


def _counted(window: Window, device: str) -> float | None:
    at = {
        one["when"]: one["value"]
        for one in window.telemetry
        if one["device"] == device and one["name"] == "energy_j"
    }
    before, after = at.get("before"), at.get("after")
    return None if before is None or after is None else float(after - before)


def _integral(window: Window, device: str) -> float | None:
    """Trapezoids between the samples inside the window; the first and the last value hold to its
    ends."""
    samples = [
        (one["at_s"], one["value"])
        for one in _of(window, [device])
        if one["name"] == "power_w" and one["value"] is not None
    ]
    inside = [(at, watts) for at, watts in samples if 0 <= at <= window.wall_s]
    if not inside:
        return None
    times = [0.0, *(at for at, _ in inside), window.wall_s]
    power = [inside[0][1], *(watts for _, watts in inside), inside[-1][1]]
    return float(np.trapezoid(power, times))


def _of(window: Window, devices: Sequence[str]) -> list[dict[str, Any]]:
    """The samples of these GPUs."""
    return [one for one in window.telemetry if one["when"] == "during" and one["device"] in devices]


def _values(rows: Rows, name: str) -> list[Mapping[str, Any]]:
    return [one for one in rows if one["name"] == name and one["value"] is not None]


def _by_gpu(rows: Rows, name: str) -> dict[str, list[float]]:
    of_gpu: dict[str, list[float]] = {}
    for one in _values(rows, name):
        of_gpu.setdefault(one["device"], []).append(one["value"])
    return of_gpu


def _instants(rows: Rows) -> set[float]:
    """When throttling was read."""
    return {one["at_s"] for one in _values(rows, "throttle_reasons")}


def _limits(rows: Rows) -> list[tuple[float, str, str]]:
    """(when, GPU, reason) of each bit that held a clock down."""
    return [
        (one["at_s"], one["device"], name)
        for one in _values(rows, "throttle_reasons")
        for bit, name in LIMITS.items()
        if int(one["value"]) & bit
    ]


def _throttling(
    limits: Sequence[tuple[float, str, str]], instants: int
) -> list[tuple[float, tuple[str, str]]]:
    """(share of the samples, (GPU, reason)), the most frequent first."""
    counts: dict[tuple[str, str], int] = {}
    for _, device, name in limits:
        counts[device, name] = counts.get((device, name), 0) + 1
    return sorted(((n / instants, key) for key, n in counts.items()), reverse=True)
