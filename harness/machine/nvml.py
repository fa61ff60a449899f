"""The GPUs through NVML: clocks, power, temperature, throttling, energy, processes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from types import TracebackType
from typing import Any

# NVML_P2P_CAPS_INDEX_READ: nvidia-ml-py has it as the tuple (0,), which its own call refuses.
P2P_READ = 0
RATE_HZ = 10.0
SAMPLED = ("sm_clock_mhz", "power_w", "temperature_c", "throttle_reasons")
"""What is read during a window; the rest before and after it alone."""

LIMITS = {
    0x04: "sw_power_cap",
    0x08: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
}
"""Bits of NVML's throttle reasons that hold a clock down; idle (0x1) and clocks that someone set
(0x2, 0x100) do not."""


def row(
    when: str, device: str, name: str, unit: str, value: float | None, reason: str | None
) -> dict[str, Any]:
    """A row of the telemetry table without its keys."""
    return {
        "when": when, "device": device, "name": name, "unit": unit, "value": value,
        "reason": reason,
    }  # fmt: skip


class Gpus:
    """The visible GPUs, open for reading; a context manager. Without a driver there are none."""

    def __enter__(self) -> Gpus:
        from harness.machine.hardware import gpus

        self._handles: dict[str, Any] = {}
        cards = gpus()
        if cards:
            import pynvml

            self._nvml = pynvml
            pynvml.nvmlInit()
            self._handles = {
                f"gpu{card['index']}": pynvml.nvmlDeviceGetHandleByIndex(card["index"])
                for card in cards
            }
        return self

    def __exit__(self, *_: object) -> None:
        if self._handles:
            self._nvml.nvmlShutdown()

    def sample(self) -> list[dict[str, Any]]:
        """Rows of SAMPLED."""
        return self._rows("during", SAMPLED)

    def read(self, when: str) -> list[dict[str, Any]]:
        """Rows of everything."""
        return self._rows(when, tuple(_READINGS))

    def used_bytes(self) -> list[int | None]:
        """Of each GPU, in the order of their indices."""
        found: list[int | None] = []
        for handle in self._handles.values():
            try:
                found.append(int(self._nvml.nvmlDeviceGetMemoryInfo(handle).used))
            except self._nvml.NVMLError:
                found.append(None)
        return found

    def strangers(self) -> frozenset[tuple[int, int]]:
        """Pairs of GPUs, by their place among the visible ones, of which the first cannot read the
        second's memory; pairs of which NVML cannot tell are left out."""
        handles = enumerate(self._handles.values())
        pairs = permutations(handles, 2)
        return frozenset((a, b) for (a, one), (b, other) in pairs if self._apart(one, other))

    def _apart(self, one: Any, other: Any) -> bool:
        nvml = self._nvml
        try:
            status = nvml.nvmlDeviceGetP2PStatus(one, other, P2P_READ)
        except nvml.NVMLError:
            return False
        return status not in (nvml.NVML_P2P_STATUS_OK, nvml.NVML_P2P_STATUS_UNKNOWN)

    def _rows(self, when: str, names: tuple[str, ...]) -> list[dict[str, Any]]:
        rows = []
        for device, handle in self._handles.items():
            for name in names:
                unit, ask = _READINGS[name]
                try:
                    value, reason = ask(self._nvml, handle), None
                except self._nvml.NVMLError as error:
                    value, reason = None, str(error)
                rows.append(row(when, device, name, unit, value, reason))
        return rows


def used_bytes(count: int) -> list[int | None]:
    """Memory in use on each of the first `count` visible GPUs, of whatever process; None where it
    cannot be read."""
    with Gpus() as gpus:
        found = gpus.used_bytes()[:count]
    return [*found, *[None] * (count - len(found))]


def strangers() -> frozenset[tuple[int, int]]:
    """Gpus.strangers() of this machine; creates no CUDA context."""
    with Gpus() as gpus:
        return gpus.strangers()


def _processes(nvml: Any, handle: Any) -> list[int]:
    return [int(p.pid) for p in nvml.nvmlDeviceGetComputeRunningProcesses(handle)]


def _own(nvml: Any, handle: Any) -> float:
    session = os.getsid(0)
    return float(sum(session_of(pid) == session for pid in _processes(nvml, handle)))


def _others(nvml: Any, handle: Any) -> float:
    return len(_processes(nvml, handle)) - _own(nvml, handle)


# Name -> unit, (pynvml, handle) -> value. Own processes are those of this one's session, which an
# engine and its ranks have to themselves.
_READINGS: dict[str, tuple[str, Callable[[Any, Any], float]]] = {
    "sm_clock_mhz": ("MHz", lambda n, h: float(n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_SM))),
    "memory_clock_mhz": ("MHz", lambda n, h: float(n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_MEM))),
    "power_w": ("W", lambda n, h: n.nvmlDeviceGetPowerUsage(h) / 1e3),
    "temperature_c": (
        "C",
        lambda n, h: float(n.nvmlDeviceGetTemperature(h, n.NVML_TEMPERATURE_GPU)),
    ),
    "throttle_reasons": (
        "bits",
        lambda n, h: float(n.nvmlDeviceGetCurrentClocksThrottleReasons(h)),
    ),
    "energy_j": ("J", lambda n, h: n.nvmlDeviceGetTotalEnergyConsumption(h) / 1e3),
    "own_processes": ("1", _own),
    "other_processes": ("1", _others),
}


def session_of(pid: int) -> int | None:
    """None where there is no such process, or it is not of this pid namespace."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        return int(stat.rsplit(")", 1)[1].split()[3])
    except (OSError, IndexError):
        return None


class Sampler:
    """Reads the GPUs ten times a second in a thread while its context is open.

    The thread holds the interpreter's lock for some microseconds a reading and waits for the driver
    without it; what it took of a core is a row of its own (`sampler_cpu_s`).
    """

    def __init__(self, period_s: float = 1 / RATE_HZ) -> None:
        self._period_s = period_s
        self._samples: list[tuple[float, list[dict[str, Any]]]] = []
        self._cpu_s: float | None = None
        self._error: str | None = None
        self._thread: threading.Thread | None = None
        self._end = threading.Event()

    def __enter__(self) -> Sampler:
        from harness.machine.hardware import gpus

        if gpus():
            self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        where: TracebackType | None,
    ) -> None:  # fmt: skip
        self._end.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            with Gpus() as gpus:
                following = time.perf_counter()
                while not self._end.wait(max(0.0, following - time.perf_counter())):
                    self._samples.append((time.perf_counter(), gpus.sample()))
                    following += self._period_s
        except Exception as error:  # of NVML; the window must not fail for a reading
            self._error = f"{type(error).__name__}: {error}"
        self._cpu_s = time.thread_time()

    def rows(self, begin_s: float) -> list[dict[str, Any]]:
        """What was read, with times after `begin_s` (perf_counter); nothing without GPUs."""
        if self._thread is None:
            return []
        found = [{**one, "at_s": at - begin_s} for at, rows in self._samples for one in rows]
        cpu_s = None if self._error else self._cpu_s
        return [*found, row("during", "cpu", "sampler_cpu_s", "s", cpu_s, self._error)]
