"""A sweep that fans out over the fake engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.fanout import command
from tests.support.fan_outs import Sweep


@pytest.fixture
def jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Sweep:
    monkeypatch.setenv("FAKE_ENGINE", str(tmp_path))
    monkeypatch.setattr(command, "START_S", 0.0)
    return Sweep(tmp_path, capsys)
