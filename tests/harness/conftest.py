from __future__ import annotations

from pathlib import Path

import pytest

from harness.sweep import execute
from tests.support.cli import Cli
from tests.support.fake_session import FakeSession


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[FakeSession]:
    """The sessions that executions start, which measure nothing; every point ends ok unless a test
    sets another behaviour."""
    made: list[FakeSession] = []
    monkeypatch.setattr(FakeSession, "made", made, raising=False)
    monkeypatch.setattr(FakeSession, "behaviour", lambda point, process: "ok", raising=False)
    monkeypatch.setattr(FakeSession, "start_behaviour", lambda cfg, _: "ok", raising=False)
    monkeypatch.setattr(execute, "Session", FakeSession)
    return made


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(tmp_path)
