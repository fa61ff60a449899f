"""What this machine can run, and for what it cannot, the reason that a skipped row gives."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Machine:
    """What the planner asks of a machine.

    Attributes:
        gpus: visible CUDA devices.
        cores: cores that this process may use.
        cxx: path of the C++ compiler that torch.compile would call on a CPU, None without one.
        packages: versions of the optional packages that are installed (triton, flash-attn, ...).
    """

    gpus: int
    cores: int
    cxx: str | None
    packages: dict[str, str]

    @classmethod
    def probe(cls) -> Machine:
        """Reads this machine without creating a CUDA context."""
        import torch

        from harness.hardware import cpu_cores

        return cls(
            gpus=torch.cuda.device_count(),
            cores=cpu_cores(),
            cxx=find_cxx(),
            packages=installed("triton", "flash-attn", "flash-attn-4"),
        )

    @property
    def device(self) -> str:
        """What device=auto is here."""
        return "cuda" if self.gpus else "cpu"


def find_cxx() -> str | None:
    """The compiler that Inductor takes: $CXX, else g++ (clang++ on macOS)."""
    default = "clang++" if sys.platform == "darwin" else "g++"
    return shutil.which(os.environ.get("CXX") or default)


def installed(*names: str) -> dict[str, str]:
    """Versions of the distributions that are installed; the others are left out."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def skip_reason(cfg: dict[str, Any], machine: Machine) -> str | None:
    """Why a resolved configuration cannot run on this machine; None if it can."""
    for check in (_device, _graphs, _compile, _attention, _comm, _timing):
        reason = check(cfg, machine)
        if reason is not None:
            return reason
    return None


def _no_gpu(what: str, cfg: dict[str, Any], machine: Machine) -> str | None:
    if cfg["device"] == "cuda":
        return None
    return f"{what} a CUDA device; {'device=cpu' if machine.gpus else 'none visible'}"


def _device(cfg: dict[str, Any], machine: Machine) -> str | None:
    if cfg["device"] != "cuda":
        return None
    if cfg["tp"] > machine.gpus:
        plural = "s" if cfg["tp"] > 1 else ""
        return f"needs {cfg['tp']} GPU{plural}, {machine.gpus} visible"
    return None


def _graphs(cfg: dict[str, Any], machine: Machine) -> str | None:
    return None if cfg["enforce_eager"] else _no_gpu("CUDA graphs need", cfg, machine)


def _compile(cfg: dict[str, Any], machine: Machine) -> str | None:
    if cfg["compile"] == "off":
        return None
    if cfg["device"] == "cpu" and machine.cxx is None:
        wanted = os.environ.get("CXX")
        found = f"CXX={wanted} is no program" if wanted else "none found"
        return f"compile={cfg['compile']} needs a C++ compiler; {found} (install g++ or set CXX)"
    if cfg["device"] == "cuda" and "triton" not in machine.packages:
        return f"compile={cfg['compile']} on a GPU needs the package triton; not installed"
    return None


def _attention(cfg: dict[str, Any], machine: Machine) -> str | None:
    from engine.config import ATTENTION_BACKENDS

    needs = {"flash2": "flash-attn", "flash4": "flash-attn-4", "triton": "triton"}
    choice = cfg["attention"]
    if choice in needs:
        reason = _no_gpu(f"attention={choice} needs", cfg, machine)
        if reason is None and needs[choice] not in machine.packages:
            reason = f"attention={choice} needs the package {needs[choice]}; not installed"
        if reason is not None:
            return reason
    return _not_in_engine("attention", choice, ATTENTION_BACKENDS)


def _comm(cfg: dict[str, Any], machine: Machine) -> str | None:
    from engine.config import COMM_PATHS

    choice = cfg["comm"]
    if choice in ("nccl", "symm_mem"):
        reason = _no_gpu(f"comm={choice} needs", cfg, machine)
        if reason is not None:
            return reason
    return _not_in_engine("comm", choice, COMM_PATHS)


def _timing(cfg: dict[str, Any], machine: Machine) -> str | None:
    if cfg["timing"] in ("auto", "host"):
        return None
    return _no_gpu(f"timing={cfg['timing']} needs", cfg, machine)


def _not_in_engine(axis: str, choice: str, known: tuple[str, ...]) -> str | None:
    if choice in known:
        return None
    return f"{axis}={choice} is not in this version of the engine, which has {', '.join(known)}"
