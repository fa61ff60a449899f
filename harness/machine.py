"""What this machine can run, and for what it cannot, the reason that a skipped row gives."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.backends import abilities

if TYPE_CHECKING:
    from engine.shape import ModelShape

MODULES = tuple({module: None for peer in abilities.PEERS.values() for module in peer.modules})
"""What the engines of others need."""

HEAD_DIM, DTYPE = 128, "bfloat16"
"""Of every published Qwen3; what `doctor`, which has no model, asks about."""


def engine_flash2(page_size: int | None, head_dim: int, dtype: str) -> str | None:
    """What the engine itself finds."""
    from engine.resolve import flash2_obstacle

    return flash2_obstacle(page_size, head_dim, dtype)


def engine_flash4(page_size: int | None, head_dim: int, dtype: str) -> str | None:
    """What the engine itself finds, of the first GPU."""
    from engine.resolve import flash4_obstacle
    from harness.hardware import gpus

    major, _, minor = gpus()[0]["capability"].partition(".") if gpus() else ("", "", "")
    return flash4_obstacle(page_size, head_dim, dtype, (int(major), int(minor)) if major else None)


@dataclass(frozen=True)
class Machine:
    """What the planner asks of a machine.

    Attributes:
        gpus: visible CUDA devices; under torchrun one for each of its processes.
        cores: cores that this process may use.
        cxx: path of the C++ compiler that torch.compile would call on a CPU, None without one.
        packages: versions of the optional packages that are installed (triton); and the modules
            that other engines need and that can be imported, without a version.
        processes: that torchrun has started, on this machine and others, a rank each; 0: it did not
            start this one, and ranks are processes of this machine.
        flash2, flash4: (page_size, head_dim, dtype) -> why that backend cannot run, None if it can.
    """

    gpus: int
    cores: int
    cxx: str | None
    packages: dict[str, str]
    processes: int = 0
    flash2: Callable[[int | None, int, str], str | None] = engine_flash2
    flash4: Callable[[int | None, int, str], str | None] = engine_flash4

    @classmethod
    def probe(cls) -> Machine:
        """Reads this machine without creating a CUDA context."""
        import torch

        from harness.hardware import cpu_cores

        gpus, processes = torch.cuda.device_count(), torchrun_processes()
        return cls(
            gpus=processes or gpus if gpus else 0,
            cores=cpu_cores(),
            cxx=find_cxx(),
            packages=installed("triton") | importable(*MODULES),
            processes=processes,
        )

    @property
    def device(self) -> str:
        """What device=auto is here."""
        return "cuda" if self.gpus else "cpu"


def torchrun_processes() -> int:
    """How many processes torchrun has started, this one among them; 0 if it has not."""
    return int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else 0


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


def importable(*modules: str) -> dict[str, str]:
    """The modules that can be imported, each with an empty text; none is imported here."""
    return {name: "" for name in modules if importlib.util.find_spec(name) is not None}


def skip_reason(
    cfg: dict[str, Any], machine: Machine, shape: ModelShape | None = None
) -> str | None:
    """Why a resolved configuration cannot run on this machine with this version of the engine; None
    if it can. Without a shape the model is taken for one like the published ones."""
    if cfg["backend"] != "native" and machine.processes:
        return f"backend={cfg['backend']}: torchrun's processes serve backend=native alone"
    if cfg["backend"] != "native":
        reason = abilities.skip_reason(cfg, machine.gpus, machine.packages, shape)
        return _device(cfg, machine) if reason is None else reason
    for check in (_device, _graphs, _compile, _comm, _own_kernels, _timing):
        reason = check(cfg, machine)
        if reason is not None:
            return reason
    return _attention(cfg, machine, shape)


def _no_gpu(what: str, cfg: dict[str, Any], machine: Machine) -> str | None:
    if cfg["device"] == "cuda":
        return None
    return f"{what} a CUDA device; {'device=cpu' if machine.gpus else 'none visible'}"


def _device(cfg: dict[str, Any], machine: Machine) -> str | None:
    if 0 < machine.processes < cfg["tp"]:
        return f"needs {cfg['tp']} processes, torchrun has started {machine.processes}"
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


def _attention(cfg: dict[str, Any], machine: Machine, shape: ModelShape | None) -> str | None:
    from engine.resolve import ATTENTION

    reason = _not_in_engine("attention", cfg, machine, ATTENTION)
    own = cfg["attention"] in ("triton", "flash2_triton")
    if reason is None and own and "triton" not in machine.packages:
        return f"attention={cfg['attention']} needs the package triton; not installed"
    flash2, flash4 = machine.flash2, machine.flash4
    by_name = {"flash2": flash2, "flash2_triton": flash2, "flash4": flash4}
    asked = by_name.get(cfg["attention"])
    if reason is not None or asked is None:
        return reason
    dtype = cfg.get("dtype", "auto")
    if dtype == "auto":
        dtype = DTYPE if shape is None else shape.dtype
    head_dim = HEAD_DIM if shape is None else shape.head_dim
    obstacle = asked(cfg.get("page_size"), head_dim, dtype)
    return None if obstacle is None else f"attention={cfg['attention']}: {obstacle}"


def _comm(cfg: dict[str, Any], machine: Machine) -> str | None:
    from engine.resolve import COMM

    return _not_in_engine("comm", cfg, machine, COMM)


def _own_kernels(cfg: dict[str, Any], machine: Machine) -> str | None:
    """fused, linear: all but the first two choices of each."""
    for name, anywhere in (("fused", "none"), ("linear", "torch")):
        asked = cfg.get("engine", {}).get(name, "auto")
        if asked not in ("auto", anywhere):
            reason = _no_gpu(f"engine.{name}={asked} needs", cfg, machine)
            if reason is not None:
                return reason
    return None


def _timing(cfg: dict[str, Any], machine: Machine) -> str | None:
    timing = cfg["timing"]
    if timing in ("auto", "host") or "collectives" not in cfg.get("instrument", ("collectives",)):
        return None
    reason = _no_gpu(f"timing={timing} needs", cfg, machine)
    if reason is None and "triton" not in machine.packages:
        reason = f"timing={timing} needs the package triton; not installed"
    return reason


def _not_in_engine(
    axis: str, cfg: dict[str, Any], machine: Machine, has: Mapping[str, tuple[str, ...]]
) -> str | None:
    """Of an axis whose choices differ by device: `has` is what this version of the engine has."""
    choice, device = cfg[axis], cfg["device"]
    if choice == "auto" or choice in has[device]:
        return None
    if choice in has["cuda"]:
        return _no_gpu(f"{axis}={choice} needs", cfg, machine)
    here = f"which has {', '.join(has[device])} on {device}"
    return f"{axis}={choice} is not in this version of the engine, {here}"
