"""Runs the test modules that need Triton's interpreter, each in a process that has it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = [
    str(path.relative_to(ROOT))
    for path in sorted((ROOT / "tests").rglob("test_*.py"))
    if "\nrequire_interpreter()\n" in path.read_text(encoding="utf-8")
]


def test_modules_are_found() -> None:
    assert "tests/engine/attention/test_triton_attention.py" in MODULES
    assert "tests/harness/observers/test_stamp_kernels.py" in MODULES


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="they run in this process")
@pytest.mark.parametrize("module", MODULES)
def test_kernels_in_the_interpreter(module: str) -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", module]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = done.stdout.splitlines()[-1]
    assert " passed" in summary and "skipped" not in summary, summary
