"""pynvml of an imaginary machine, which `install` puts in the place of the real one."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from harness.machine import hardware


class FakeNvml:
    """GPUs whose readings are what `values` says, by GPU: sm, memory (MHz), mw, c, bits, mj, pids,
    used (bytes), p2p (status of reading each GPU's memory, 0: can).
    A value that is an exception is raised; `opened` counts what was not shut down."""

    # The binding's own, whatever they are: it has had a tuple among them.
    NVML_CLOCK_SM, NVML_CLOCK_MEM = pynvml.NVML_CLOCK_SM, pynvml.NVML_CLOCK_MEM
    NVML_TEMPERATURE_GPU = pynvml.NVML_TEMPERATURE_GPU
    NVML_P2P_CAPS_INDEX_READ = pynvml.NVML_P2P_CAPS_INDEX_READ
    NVML_P2P_STATUS_OK = pynvml.NVML_P2P_STATUS_OK
    NVML_P2P_STATUS_UNKNOWN = pynvml.NVML_P2P_STATUS_UNKNOWN

    class NVMLError(Exception):
        pass

    def __init__(self, values: list[dict[str, Any]]) -> None:
        self.values = values
        self.opened = 0
        self.reads = 0

    def _get(self, handle: int, name: str) -> Any:
        self.reads += 1
        value = self.values[handle][name]
        if isinstance(value, Exception):
            raise value
        return value

    def nvmlInit(self) -> None:
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.values)

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}{handle}{handle}{handle}-aaaa"

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> Any:
        assert type(kind) is int
        return self._get(handle, {1: "sm", 2: "memory"}[kind])

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(used=self._get(handle, "used"))

    def nvmlDeviceGetPowerUsage(self, handle: int) -> Any:
        return self._get(handle, "mw")

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> Any:
        return self._get(handle, "c")

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> Any:
        return self._get(handle, "bits")

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> Any:
        return self._get(handle, "mj")

    def nvmlDeviceGetP2PStatus(self, one: int, other: int, kind: int) -> Any:
        assert type(kind) is int and kind == 0  # all that its C function takes
        return self._get(one, "p2p")[other]

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> Any:
        return [SimpleNamespace(pid=pid) for pid in self._get(handle, "pids")]


def reading(**changes: Any) -> dict[str, Any]:
    """Readings of one GPU."""
    base = {"sm": 1980, "memory": 3201, "mw": 300_000, "c": 40, "bits": 0, "mj": 5_000, "pids": [],
            "used": 1 << 30, "p2p": [0] * 8}  # fmt: skip
    return {**base, **changes}


def install(monkeypatch: pytest.MonkeyPatch, *values: dict[str, Any]) -> FakeNvml:
    hardware.capture()  # kept for the process: of the real machine, not of this one
    nvml = FakeNvml(list(values))
    cards = tuple({"index": index, "name": "Fake"} for index in range(len(values)))
    monkeypatch.setitem(sys.modules, "pynvml", nvml)  # type: ignore[arg-type]
    monkeypatch.setattr(hardware, "gpus", lambda: cards)
    return nvml
