"""What this machine can run, and for what it cannot, the reason that a skipped row gives."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.settings import abilities

if TYPE_CHECKING:
    from engine.shape import ModelShape

MODULES = tuple({module: None for peer in abilities.PEERS.values() for module in peer.modules})
"""What the engines of others need."""

HEAD_DIM, DTYPE = 128, "bfloat16"
"""Of every published Qwen3; what `doctor`, which has no model, asks about."""


def engine_flash2(page_size: int | None, head_dim: int, dtype: str) -> str | None:
    """What the engine itself finds."""
    from engine.attention.obstacles import flash2_obstacle

    return flash2_obstacle(page_size, head_dim, dtype)


def engine_flash4(page_size: int | None, head_dim: int, dtype: str) -> str | None:
    """What the engine itself finds, of the first GPU."""
    from engine.attention.obstacles import flash4_obstacle
    from harness.machine.hardware import gpus

    major, _, minor = gpus()[0]["capability"].partition(".") if gpus() else ("", "", "")
    return flash4_obstacle(page_size, head_dim, dtype, (int(major), int(minor)) if major else None)


@dataclass(frozen=True)
class Machine:
    """What the planner asks of a machine.

    Attributes:
        gpus: visible CUDA devices; under torchrun one for each of its processes.
        cores: cores that this process may use.
        cxx: path of the C++ compiler that torch.compile would call on a CPU, None without one.
        packages: what can be imported of triton and of the modules that other engines need.
        processes: that torchrun has started, on this machine and others, a rank each; 0: it did not
            start this one, and ranks are processes of this machine.
        processes_here: those of them on this machine.
        strangers: pairs of GPUs, numbered as CUDA does, of which the first is known not to reach
            the memory of the second.
        flash2, flash4: (page_size, head_dim, dtype) -> why that backend cannot run, None if it can.
    """

    gpus: int
    cores: int
    cxx: str | None
    packages: dict[str, str]
    processes: int = 0
    processes_here: int = 0
    strangers: frozenset[tuple[int, int]] = frozenset()
    flash2: Callable[[int | None, int, str], str | None] = engine_flash2
    flash4: Callable[[int | None, int, str], str | None] = engine_flash4

    @classmethod
    def probe(cls) -> Machine:
        """Reads this machine without creating a CUDA context."""
        import torch

        from harness.machine import nvml
        from harness.machine.hardware import cpu_cores

        gpus, processes = torch.cuda.device_count(), torchrun_processes()
        return cls(
            gpus=processes or gpus if gpus else 0,
            cores=cpu_cores(),
            cxx=find_cxx(),
            packages=importable("triton", *MODULES),
            processes=processes,
            processes_here=int(os.environ["LOCAL_WORLD_SIZE"]) if processes else 0,
            strangers=nvml.strangers() if gpus else frozenset(),
        )

    @property
    def device(self) -> str:
        """What device=auto is here."""
        return "cuda" if self.gpus else "cpu"

    def reach(self, one: int, other: int) -> bool:
        """Whether GPU one can read the memory of GPU other, for all that is known."""
        return (one, other) not in self.strangers


def torchrun_processes() -> int:
    """How many processes torchrun has started, this one among them; 0 if it has not."""
    return int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else 0


def find_cxx() -> str | None:
    """The compiler that Inductor takes: $CXX, else g++ (clang++ on macOS)."""
    default = "clang++" if sys.platform == "darwin" else "g++"
    return shutil.which(os.environ.get("CXX") or default)


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
    for check in (_device, _triton, _graphs, _compile, _own_kernels, _timing):
        reason = check(cfg, machine)
        if reason is not None:
            return reason
    return _comm(cfg, machine, shape) or _attention(cfg, machine, shape)


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


def _triton(cfg: dict[str, Any], machine: Machine) -> str | None:
    from engine.resolve import NO_TRITON

    return NO_TRITON if cfg["device"] == "cuda" and "triton" not in machine.packages else None


def _graphs(cfg: dict[str, Any], machine: Machine) -> str | None:
    from engine.resolve import CAPTURED_PROMPTS

    if cfg["enforce_eager"]:
        return None
    rows, attention = cfg.get("engine", {}).get("graph_prompt_tokens"), cfg["attention"]
    if rows and cfg["device"] == "cuda" and attention not in ("auto", *CAPTURED_PROMPTS):
        return f"engine.graph_prompt_tokens={rows}: no graph can hold prompts by {attention}"
    return _no_gpu("CUDA graphs need", cfg, machine)


def _compile(cfg: dict[str, Any], machine: Machine) -> str | None:
    if cfg["compile"] == "off":
        return None
    if cfg["device"] == "cpu" and machine.cxx is None:
        wanted = os.environ.get("CXX")
        found = f"CXX={wanted} is no program" if wanted else "none found"
        return f"compile={cfg['compile']} needs a C++ compiler; {found} (install g++ or set CXX)"
    return None


def _attention(cfg: dict[str, Any], machine: Machine, shape: ModelShape | None) -> str | None:
    from engine.attention.obstacles import triton_obstacle
    from engine.resolve import ATTENTION

    reason = _not_in_engine("attention", cfg, machine, ATTENTION)
    flash2, flash4 = machine.flash2, machine.flash4
    by_name = {
        "flash2": flash2,
        "flash2_triton": flash2,
        "flash4": flash4,
        "triton": lambda page_size, head_dim, dtype: triton_obstacle(head_dim),
    }
    asked = by_name.get(cfg["attention"])
    if reason is not None or asked is None:
        return reason
    head_dim = HEAD_DIM if shape is None else shape.head_dim
    obstacle = asked(cfg.get("page_size"), head_dim, _dtype(cfg, shape))
    return None if obstacle is None else f"attention={cfg['attention']}: {obstacle}"


def _comm(cfg: dict[str, Any], machine: Machine, shape: ModelShape | None) -> str | None:
    from engine.resolve import COMM, SHARED, symm_mem_obstacle

    reason = _not_in_engine("comm", cfg, machine, COMM)
    tp = cfg["tp"]
    if reason is not None or cfg["comm"] not in SHARED or tp == 1:
        return reason
    here = min(tp, machine.processes_here) if machine.processes else tp
    obstacle = symm_mem_obstacle(_dtype(cfg, shape), tp, here, 0, machine.reach)
    return None if obstacle is None else f"comm={cfg['comm']}: {obstacle}; set comm=nccl"


def _dtype(cfg: dict[str, Any], shape: ModelShape | None) -> str:
    dtype: str = cfg.get("dtype", "auto")
    if dtype != "auto":
        return dtype
    return DTYPE if shape is None else shape.dtype


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
    return _no_gpu(f"timing={timing} needs", cfg, machine)


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
