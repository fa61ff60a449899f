"""A clock of the harness that stands still unless a test moves it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from harness.measuring import window
from harness.sweep import passes


class Clock:
    """Takes the place of perf_counter wherever windows and repeats are timed.

    Attributes:
        now: what it says, in s.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        for module in (passes, window):
            monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: self.now))
