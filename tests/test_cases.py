"""The tables of faults in tests/README.md: every test that they name can be run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent
PLACES = {"anywhere", "1 GPU", "2 GPUs"}
NAMED = re.compile(r"`([\w/]+\.py)::(\w+)`")


def rows() -> list[tuple[str, str, set[str]]]:
    """(fault, what stands against it, where that runs)"""
    lines = (TESTS / "README.md").read_text(encoding="utf-8").splitlines()
    cells = [[c.strip() for c in x.strip("|").split("|")] for x in lines if x.startswith("| ")]
    assert all(len(row) == 3 for row in cells)
    return [(a, b, set(c.split(", "))) for a, b, c in cells if a != "fault"]


def test_every_fault_has_a_test_or_a_reason_and_a_place() -> None:
    found = rows()
    assert len({fault for fault, *_ in found}) == len(found) >= 80
    for fault, here, runs in found:
        named = NAMED.findall(here)
        assert named or "impossible: " in here, fault
        assert runs and runs <= PLACES, fault
        on_gpu = {path.startswith("gpu/") for path, _ in named} or {False}
        assert {place != "anywhere" for place in runs} == on_gpu, fault


def test_every_test_that_is_named_is_collected() -> None:
    named = {f"tests/{path}::{name}" for _, here, _ in rows() for path, name in NAMED.findall(here)}
    files = sorted({name.split("::")[0] for name in named})
    collected = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", *files],
        capture_output=True, text=True, check=True, cwd=TESTS.parent,
    ).stdout  # fmt: skip
    assert len(files) > 20
    assert named <= {line.split("[")[0] for line in collected.splitlines()}
