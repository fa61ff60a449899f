"""doctor: what it calls runnable is what the planner would not skip."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from harness.doctor import axes_table, axis_values, installed_table, nsys_row
from harness.machine.capabilities import Machine
from harness.settings.config import CHOICES
from tests.support.plans import CPU

FOUND: dict[str, Any] = {
    "cpu": "A CPU",
    "cpu_cores": 2,
    "memory_bytes": 8 << 30,
    "gpus": [],
    "driver": None,
    "bytecode": True,
    "versions": {
        "torch": "2.13.0",
        "triton": None,
        "flash_attn": None,
        "flash_attn_4": None,
        "nvtx": "0.2",
        "vllm": None,
    },
}


def shown(table: Any) -> list[list[str]]:
    out = io.StringIO()
    Console(file=out, width=200).print(table)
    return [line.split() for line in out.getvalue().splitlines()]


def test_commands_are_whole_at_any_width() -> None:
    out = io.StringIO()
    found = {**FOUND, "versions": {"nano_vllm": None}}
    table = installed_table(found, Machine(gpus=0, cores=2, cxx=None, packages={}))
    Console(file=out, width=60).print(table)
    said = "".join(out.getvalue().split())
    assert "pipinstallgit+https://github.com/GeeeekExplorer/nano-vllm" in said


def test_on_a_cpu_without_a_compiler() -> None:
    machine = Machine(gpus=0, cores=2, cxx=None, packages={})
    reasons = {(axis, value): reason for axis, value, reason in axis_values(machine)}
    assert {k for k, reason in reasons.items() if reason is None} == {
        ("backend", "native"),
        ("backend", "transformers"),
        ("tp", 1),
        ("tp", 2),
        ("tp", 4),
        ("tp", 8),
        ("enforce_eager", True),
        ("compile", "off"),
        ("attention", "auto"),
        ("attention", "sdpa"),
        ("comm", "auto"),
        ("comm", "gloo"),
        ("timing", "auto"),
        ("timing", "host"),
    }
    assert reasons["compile", "model"] == (
        "compile=model needs a C++ compiler; none found (install g++ or set CXX)"
    )
    for axis in ("compile", "attention", "comm", "timing"):
        assert [v for a, v in reasons if a == axis] == list(CHOICES[axis])


def test_on_two_gpus() -> None:
    machine = Machine(gpus=2, cores=8, cxx=None, packages={"triton": "3.6"})
    reasons = {(axis, value): reason for axis, value, reason in axis_values(machine)}
    assert reasons["tp", 2] is None
    assert reasons["tp", 4] == "needs 4 GPUs, 2 visible"
    assert reasons["enforce_eager", False] is None
    assert reasons["compile", "model"] is None


def test_the_tables_say_what_to_install() -> None:
    rows = shown(installed_table(FOUND, CPU))
    assert ["torch", "2.13.0"] in rows
    assert ["C++", "compiler", "/usr/bin/g++"] in rows
    flash = next(row for row in rows if row[:1] == ["flash_attn"])
    what = "attention=flash2_triton, flash2: pip install flash-attn (NVIDIA GPU)"
    assert " ".join(flash) == f"flash_attn none {what}"
    vllm = next(row for row in rows if row[:1] == ["vllm"])
    assert " ".join(vllm) == "vllm none backend=vllm: pip install 'rangefinder[peers]'"
    newer = next(row for row in rows if row[:1] == ["flash_attn_4"])
    assert " ".join(newer).startswith("flash_attn_4 none attention=flash4: pip install 'flash-attn")
    without = shown(installed_table(FOUND, Machine(gpus=0, cores=2, cxx=None, packages={})))
    compiler = next(" ".join(row) for row in without if row[:2] == ["C++", "compiler"])
    assert compiler.endswith("install g++ or set CXX")


def test_a_gpu_that_torch_cannot_see_is_pointed_out() -> None:
    found = {**FOUND, "gpus": [{"name": "A GPU"}], "driver": "595"}
    text = "\n".join(" ".join(row) for row in shown(installed_table(found, CPU)))
    assert "torch sees none of them: install a CUDA build of torch" in text


def test_a_torch_without_bytecode_is_pointed_out() -> None:
    text = " ".join(" ".join(r) for r in shown(installed_table({**FOUND, "bytecode": False}, CPU)))
    assert "bytecode of torch none each process compiles torch anew" in text
    assert "PYTHONPYCACHEPREFIX" in text
    kept = shown(installed_table(FOUND, CPU))
    assert not [row for row in kept if row[:1] == ["bytecode"]]


def test_values_are_shown_as_they_are_written() -> None:
    rows = shown(axes_table(CPU))
    assert ["enforce_eager", "true", "runs"] in rows
    refused = next(row for row in rows if row[:2] == ["enforce_eager", "false"])
    assert " ".join(refused[2:]) == "CUDA graphs need a CUDA device; none visible"


def test_nsys_is_shown_with_what_it_cannot_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "nsys"
    path.write_text("#!/bin/sh\necho NVIDIA Nsight Systems version $VERSION\n")
    path.chmod(0o755)
    monkeypatch.setenv("NSYS", str(path))
    monkeypatch.setenv("VERSION", "2025.3.2.474-0v0")
    assert nsys_row("0.2.17") == ("2025.3.2.474", str(path))
    assert nsys_row(None) == ("2025.3.2.474", str(path))
    monkeypatch.setenv("VERSION", "2022.4.2.1")
    version, why = nsys_row("0.2.17")
    assert version == "2022.4.2.1" and why.startswith("nsys 2022.4.2.1 records no range of nvtx")
    monkeypatch.setenv("NSYS", "/gone/nsys")
    assert nsys_row("0.2.17") == (
        "none", "python -m harness profile: NSYS=/gone/nsys: no such program"
    )  # fmt: skip
