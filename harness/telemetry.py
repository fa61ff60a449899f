"""Readings of the machine round a pass: load, clocks, power, temperature, throttling."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def read(when: str) -> list[dict[str, Any]]:
    """Rows of the telemetry table without their keys; a value that cannot be read is None and has a
    reason."""
    rows = [_row(when, "cpu", *reading) for reading in (_load(), _cpu_clock())]
    return rows + _gpu_rows(when)


Reading = tuple[str, str, float | None, str | None]  # name, unit, value, reason why it is None


def _row(
    when: str, device: str, name: str, unit: str, value: float | None, reason: str | None
) -> dict[str, Any]:
    return {
        "when": when,
        "device": device,
        "name": name,
        "unit": unit,
        "value": value,
        "reason": reason,
    }


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


def _gpu_rows(when: str) -> list[dict[str, Any]]:
    from harness.hardware import gpus

    cards = gpus()
    if not cards:
        return []
    import pynvml as nvml

    def clock(kind: int) -> Callable[[Any], float]:
        return lambda h: float(nvml.nvmlDeviceGetClockInfo(h, kind))

    readings: list[tuple[str, str, Callable[[Any], float]]] = [
        ("sm_clock_mhz", "MHz", clock(nvml.NVML_CLOCK_SM)),
        ("memory_clock_mhz", "MHz", clock(nvml.NVML_CLOCK_MEM)),
        ("power_w", "W", lambda h: nvml.nvmlDeviceGetPowerUsage(h) / 1e3),
        (
            "temperature_c",
            "C",
            lambda h: float(nvml.nvmlDeviceGetTemperature(h, nvml.NVML_TEMPERATURE_GPU)),
        ),
        (
            "throttle_reasons",
            "bits",
            lambda h: float(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(h)),
        ),
    ]
    rows = []
    nvml.nvmlInit()
    try:
        for card in cards:
            handle = nvml.nvmlDeviceGetHandleByIndex(card["index"])
            for name, unit, ask in readings:
                try:
                    value, reason = ask(handle), None
                except nvml.NVMLError as error:
                    value, reason = None, str(error)
                rows.append(_row(when, f"gpu{card['index']}", name, unit, value, reason))
    finally:
        nvml.nvmlShutdown()
    return rows
