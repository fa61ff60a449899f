"""A session that measures nothing: its points end as the test says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.planning.plan import Point
from harness.sweep.session import Outcome
from harness.sweep.worker import Functions

Behaviour = Callable[[Point, int], str]


class FakeSession:
    """Stands for harness.sweep.session.Session and keeps a record of what every session did."""

    made: list[FakeSession]
    behaviour: Behaviour
    start_behaviour: Behaviour

    def __init__(self, log: Path, functions: Functions, on_progress: Callable[[str], None]) -> None:
        self.on_progress = on_progress
        self.measured: list[Point] = []
        self.ended = ""
        self.cache: Path | None = None
        self.made.append(self)

    def start(self, cfg: dict[str, Any], cache_dir: Path, timeout_s: float) -> Outcome:
        self.cfg, self.cache, self.timeout_s = cfg, cache_dir, timeout_s
        self.found = sorted(p.name for p in cache_dir.iterdir()) if cache_dir.is_dir() else []
        cache_dir.mkdir(parents=True, exist_ok=True)
        (cache_dir / f"code of {len(self.made)}").touch()
        status = type(self).start_behaviour(cfg, 0)
        return Outcome(status, f"start: {status}", engine_alive=status == "ok")

    def measure(self, point: Point, process: int, out_dir: Path, timeout_s: float) -> Outcome:
        assert not self.ended
        assert list(out_dir.iterdir()) == []
        self.measured.append(point)
        status = type(self).behaviour(point, process)
        if status == "interrupt":
            raise KeyboardInterrupt
        if status in ("error", "oom", "timeout"):
            (out_dir / "half-written").touch()
            return Outcome(status, f"{status} of {point.index}", f"Traceback: {point.index}")
        short = status == "short"
        (out_dir / "points.parquet").write_text(status)
        return Outcome("error" if short else status, None, has_tables=True, engine_alive=True)

    def close(self) -> None:
        self.ended = self.ended or "closed"

    def kill(self) -> None:
        self.ended = self.ended or "killed"
