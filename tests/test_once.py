from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from harness.machine.models import built
from tests.support.once import one_at_a_time

DIES = """
import os
from tests.support.once import one_at_a_time
with one_at_a_time("test"):
    os._exit(3)
"""


def test_what_many_ask_for_at_once_is_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a process that ended while it wrote."""
    monkeypatch.setenv("RANGEFINDER_CACHE", str(tmp_path))
    root = Path(__file__).parents[1]
    assert subprocess.run([sys.executable, "-c", DIES], cwd=root, check=False).returncode == 3
    written = []

    def make(_: int) -> Path:
        with one_at_a_time("test"):
            return built("x", "recipe", written.append)

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(make, range(8)))) == 1
    assert len(written) == 1
