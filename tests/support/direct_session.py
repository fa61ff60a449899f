"""harness.sweep.session.Session without a process: it writes the fake engine's tables itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from harness.planning.plan import Point
from harness.sweep.session import Outcome
from harness.sweep.worker import Functions
from tests.support import fake_engine


class DirectSession:
    """Each point ends ok; `measured` has their indices, of all sessions."""

    measured: ClassVar[list[int]] = []

    def __init__(self, log: Path, functions: Functions, on_progress: Callable[[str], None]) -> None:
        self.on_progress = on_progress

    def start(self, cfg: dict[str, Any], cache_dir: Path, timeout_s: float) -> Outcome:
        return Outcome("ok", engine_alive=True)

    def measure(self, point: Point, process: int, out_dir: Path, timeout_s: float) -> Outcome:
        fake_engine.write_tables(point, out_dir, "ok", process)
        self.measured.append(point.index)
        fake_engine.record("measured", str(point.index))
        return Outcome("ok", has_tables=True, engine_alive=True)

    def close(self) -> None: ...

    def kill(self) -> None: ...
