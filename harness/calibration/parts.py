"""What a calibration is made of: its parts by name, and the sizes of collectives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.machine.models import PUBLISHED, TINY
from harness.observers.records import ITEM_BYTES

if TYPE_CHECKING:
    from harness.machine.capabilities import Machine

DEVICE_PARTS = ("clock", "read", "copy", "matmul", "launch", "graph_node", "stamps", "events")
"""Of one process on the first device."""
KINDS = ("all_reduce", "gather", "broadcast")
MODES = ("eager", "graph")
"""Launched behind a backlog (on a CPU: called), and as nodes of a CUDA graph."""
BATCHES = {"cuda": (1, 8, 32, 128, 256), "cpu": (1, 4, 16)}
"""Those of +experiment=tp_sweep, whose payloads are measured beside the powers of two."""
FUSED = "symm_fused"
"""The path whose all-reduces are one kernel with the residual's addition and the norm."""
FUSED_HOLDS = "sum over ranks, addition to the residual, norm"
DTYPE = {"cuda": "bfloat16", "cpu": "float32"}
_ALL_REDUCE = {
    "cuda": [1 << e for e in range(11, 27)],  # 2 KiB to 64 MiB
    "cpu": [1 << e for e in range(9, 21, 2)],  # 512 B to 512 KiB
}


@dataclass(frozen=True, slots=True)
class Curve:
    """One collective by size. `path`: the engine's implementation; `mode`: of MODES. All that is
    calibrated of FUSED is its all_reduce, and its time is that of FUSED_HOLDS: sums that no norm
    follows go as by symm_mem, the other kinds as by nccl."""

    kind: str
    path: str
    world: int
    mode: str

    @property
    def name(self) -> str:
        return f"{self.kind}/{self.path}/{self.world}/{self.mode}"

    @classmethod
    def named(cls, name: str) -> Curve:
        kind, path, world, mode = name.split("/")
        return cls(kind, path, int(world), mode)


def plan(machine: Machine, worlds: Sequence[int]) -> list[str]:
    """Names of the parts, in the order of measuring: world 1 stands for DEVICE_PARTS."""
    from engine.resolve import COMM

    names = list(DEVICE_PARTS) if 1 in worlds else []
    curves = [
        Curve(kind, path, world, mode)
        for world in sorted(set(worlds) - {1})
        for path in COMM[machine.device]
        for kind in (KINDS if path != FUSED else KINDS[:1])
        for mode in MODES
    ]
    return names + [curve.name for curve in curves]


def obstacle(name: str, machine: Machine) -> str | None:
    """Why this machine cannot measure the part; None if it can."""
    stamped = name in ("launch", "graph_node", "stamps", "events") or "/" in name
    if machine.device == "cpu":
        if name.endswith("/graph"):
            return "CUDA graphs need a CUDA device; none visible"
        return "it is of a CUDA device; none visible" if stamped and "/" not in name else None
    if stamped and "triton" not in machine.packages:
        return "timestamp kernels need the package triton; not installed"
    if "/" not in name:
        return None
    from engine.resolve import SHARED, symm_mem_obstacle

    curve = Curve.named(name)
    if curve.path not in SHARED:
        return None
    return symm_mem_obstacle(DTYPE["cuda"], curve.world, curve.world, 0, machine.reach)


def default_worlds(machine: Machine) -> list[int]:
    """1, and the TP sizes up to the number of GPUs; 1 and 2 on a CPU of as many cores."""
    return [n for n in (1, 2, 4, 8) if n <= (machine.gpus or min(2, machine.cores))]


def _models(device: str) -> dict[str, dict[str, int]]:
    """Models whose payloads are marked: name -> config.json."""
    return PUBLISHED if device == "cuda" else {"tiny": TINY}


def sizes(kind: str, device: str) -> list[tuple[int, str]]:
    """(bytes, dtype) of a curve's points, ascending: all-reduces 2 KiB to 64 MiB on a GPU; the
    gathered logits and the broadcast ids of BATCHES."""
    dtype = "int64" if kind == "broadcast" else DTYPE[device]
    found = set(marks(kind, device))
    if kind == "all_reduce":
        found |= set(_ALL_REDUCE[device])
    return [(size, dtype) for size in sorted(found)]


def fused_shapes(world: int, device: str) -> list[tuple[int, int]]:
    """(rows, hidden size) of the points of FUSED, by bytes ascending: payloads of BATCHES that its
    kernel takes, and of each model the most rows that it takes. It works row by row, so that bytes
    alone do not say what it does: where two models share a size, it is of the wider rows."""
    import torch

    from engine.comm.fused import most_rows

    dtype = DTYPE[device]
    found: dict[int, tuple[int, int]] = {}
    for hidden in sorted({c["hidden_size"] for c in _models(device).values()}, reverse=True):
        most = most_rows(hidden, getattr(torch, dtype), world)
        for rows in {*BATCHES[device], most}:
            if 0 < rows <= most:
                found.setdefault(rows * hidden * ITEM_BYTES[dtype], (rows, hidden))
    return [found[size] for size in sorted(found)]


def marks(kind: str, device: str) -> dict[int, str]:
    """bytes -> which decode steps have a collective of that size, as "8b x32": model and batch."""
    of_size: dict[int, list[str]] = {}
    for batch in BATCHES[device]:
        for model, config in _models(device).items():
            size = payload(kind, config["hidden_size"], config["vocab_size"], batch, DTYPE[device])
            text = f"{model.removeprefix('qwen3-')} x{batch}"
            if kind != "all_reduce":  # the same for every published model
                text = f"x{batch}"
            of_size.setdefault(size, []).append(text)
    return {size: ", ".join(dict.fromkeys(texts)) for size, texts in sorted(of_size.items())}


def payload(kind: str, hidden: int, vocab: int, batch: int, dtype: str) -> int:
    """Bytes of a decode step's collective, as in Collective.bytes: an all-reduce of hidden states,
    the gathered logits at the root, the broadcast ids (int64)."""
    width = {"all_reduce": hidden, "gather": vocab, "broadcast": 1}[kind]
    return batch * width * ITEM_BYTES["int64" if kind == "broadcast" else dtype]
