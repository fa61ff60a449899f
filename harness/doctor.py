"""`python -m harness doctor`: what is installed, what runs here and what is missing."""

from __future__ import annotations

from typing import Any

from rich.table import Column, Table
from rich.text import Text

from harness.machine.capabilities import Machine, skip_reason
from harness.nsys.command import NsysError, deafness, find
from harness.settings.abilities import PEERS
from harness.settings.config import CHOICES, as_written

OPTIONAL = {
    "triton": "the engine, timing=stamps and compile on a GPU: pip install triton",
    "flash_attn": "attention=flash2_triton, flash2: pip install flash-attn (NVIDIA GPU)",
    "flash_attn_4": "attention=flash4: pip install 'flash-attn-4[cu13]==4.0.0b36'",
    "nvtx": "NVTX ranges: pip install nvtx",
    "nccl": "TP over GPUs: comes with a CUDA build of torch",
    "vllm": f"backend=vllm: {PEERS['vllm'].modules['vllm']}",
    "nano_vllm": f"backend=nanovllm: {PEERS['nanovllm'].modules['nanovllm']}",
}
NO_BYTECODE = (
    "each process compiles torch anew, seconds of an engine's start: unset "
    "PYTHONDONTWRITEBYTECODE, and where torch is read-only set PYTHONPYCACHEPREFIX to a folder"
)


def doctor() -> int:
    """Prints what was found; always 0, since nothing that is missing is a fault."""
    from harness.machine.hardware import capture
    from harness.tables.console import stdout

    console = stdout()
    machine, found = Machine.probe(), capture()
    console.print(installed_table(found, machine))
    console.print()
    console.print(axes_table(machine))
    return 0


def installed_table(found: dict[str, Any], machine: Machine) -> Table:
    """What `hardware.capture()` and the planner's probe found."""
    purpose = Column("what it is for", overflow="fold")  # whole at any width, to be copied
    table = Table("", "found", purpose, box=None, pad_edge=False, title_justify="left")
    memory = found["memory_bytes"]
    cores = f"{found['cpu']}, {found['cpu_cores']} cores"
    table.add_row("cpu", cores if memory is None else f"{cores}, {memory / 2**30:.0f} GiB", "")
    names = ", ".join(gpu["name"] for gpu in found["gpus"]) or "none"
    table.add_row("gpus", names, "" if machine.gpus else "CUDA graphs, NCCL, device times")
    if found["gpus"] and not machine.gpus:
        table.add_row("", "", "torch sees none of them: install a CUDA build of torch")
    table.add_row("driver", found["driver"] or "none", "")
    cxx = "compile=layer and compile=model on a CPU: install g++ or set CXX"
    table.add_row("C++ compiler", machine.cxx or "none", "" if machine.cxx else cxx)
    for name, version in found["versions"].items():
        table.add_row(name, version or "none", Text("" if version else OPTIONAL.get(name, "")))
    if found["bytecode"] is False:
        table.add_row("bytecode of torch", "none", NO_BYTECODE)
    table.add_row("nsys", *nsys_row(found["versions"].get("nvtx")))
    return table


def nsys_row(nvtx: str | None) -> tuple[str, str]:
    """(version of nsys, what it is for or why it is of no use)."""
    try:
        nsys = find()
    except NsysError as error:
        return "none", f"python -m harness profile: {str(error).splitlines()[0]}"
    return nsys.version, (nvtx and deafness(nsys.version, nvtx)) or nsys.path


def axes_table(machine: Machine) -> Table:
    """One row an axis value: whether a point with it runs here, or why not."""
    table = Table("axis", "value", Column("here", overflow="fold"), box=None, pad_edge=False)
    for axis, value, reason in axis_values(machine):
        table.add_row(axis, as_written(value), Text(reason or "runs"))  # [peers] is no markup
    return table


def axis_values(machine: Machine) -> list[tuple[str, Any, str | None]]:
    """(axis, value, why it cannot run here or None), each with the other axes at their default."""
    values: dict[str, tuple[Any, ...]] = {
        "backend": CHOICES["backend"],
        "tp": (1, 2, 4, 8),
        "enforce_eager": (True, False),
        **{axis: CHOICES[axis] for axis in ("compile", "attention", "comm", "timing")},
    }
    base: dict[str, Any] = {
        "backend": "native",
        "tp": 1,
        "enforce_eager": True,
        "compile": "off",
        "attention": "auto",
        "comm": "auto",
        "timing": "host",
        "device": machine.device,
    }
    return [
        (axis, value, skip_reason({**base, axis: value}, machine))
        for axis, choices in values.items()
        for value in choices
    ]
