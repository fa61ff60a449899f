"""Triton kernels beside their PyTorch references; imported where a GPU needs them."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Kernels:
    """Which own kernels a model takes on a GPU; the fields as in EngineConfig, without auto."""

    fused: str = "layers"
    linear: str = "torch"

    @property
    def layers(self) -> bool:
        return self.fused != "none"


USUAL = Kernels()
"""What a module has that is not told, which runs on a CPU too; an engine tells its own
(engine/resolve.py)."""


def runs_triton(x: torch.Tensor) -> bool:
    """Whether own kernels take x: on a GPU, and on meta as there, unless torch.compile is tracing,
    which fuses the plain formula with its neighbours."""
    return (x.is_cuda or x.is_meta) and not torch.compiler.is_compiling()


def triton_builds() -> int:
    """Kernels that Triton has built or loaded in this process; one that appears inside a measured
    window means that warm-up missed a shape."""
    if "engine.kernels.launch" not in sys.modules:
        return 0
    from engine.kernels.launch import Kernel

    own = [m for name, m in sys.modules.items() if name.startswith("engine.kernels.")]
    kernels = [k for m in own for k in vars(m).values() if isinstance(k, Kernel)]
    return sum(kernel.num_builds for kernel in kernels)
