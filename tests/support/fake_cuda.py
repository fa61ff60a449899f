"""A GPU on which Triton builds for an H200 and launches nothing, but says what it would have."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

_devices = count(1000)  # no device's numbers, so that nothing built for one is launched elsewhere


class FakeCuda:
    """Triton's driver. `launches`: (grid, function, arguments) of each; `loads`: builds, whose
    functions are numbered from 1."""

    def __init__(self) -> None:
        from triton.backends.compiler import GPUTarget

        self.device = next(_devices)
        self.launches: list[tuple[tuple[int, ...], int, tuple[Any, ...]]] = []
        self.loads = 0
        self._target = GPUTarget("cuda", 90, 32)
        limits = {"max_shared_mem": 227 * 1024}
        self.utils = SimpleNamespace(
            load_binary=self._load, get_device_properties=lambda device: limits
        )

    def _load(self, *args: Any) -> tuple[int, int, int, int, int]:
        self.loads += 1
        return self.loads, self.loads, 32, 0, 1024  # module, function, registers, spills, threads

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        def launch(x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
            # before the arguments: the build's metadata, the launch's, two hooks
            self.launches.append(((x, y, z), function, rest[4:]))

        return launch

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 0


def install(monkeypatch: pytest.MonkeyPatch, cache_dir: str) -> FakeCuda:
    """In the place of the driver of this machine's GPUs, for one test."""
    from triton.compiler import compiler
    from triton.runtime import driver

    fake = FakeCuda()
    monkeypatch.setenv("TRITON_CACHE_DIR", cache_dir)
    monkeypatch.setattr(driver, "_active", fake)
    monkeypatch.setattr(compiler, "max_shared_mem", lambda device: 227 * 1024)
    return fake
