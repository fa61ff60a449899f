"""A sweep as jobs of the fake engine, and its rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from harness.__main__ import conf_folder
from harness.fanout.command import fan_out
from harness.machine.models import TINY
from harness.settings import launcher
from harness.settings.config import register
from harness.store import load
from tests.support.fake_engine import FUNCTIONS, recorded
from tests.support.plans import sweep

Submit = Callable[[Callable[[Any], int], Sequence[list[str]], Path], Sequence[Any]]


class Sweep:
    """Four points on two engines, as two jobs. Hydra's own basic launcher runs them in this
    process, one after the other, but for those in `dying`, in which it raises."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self._capsys = capsys
        register()
        (folder / "model").mkdir()
        text = json.dumps({"model_type": "qwen3", **TINY})
        (folder / "model" / "config.json").write_text(text)
        fixed = {"device": "cpu", "results_dir": str(folder / "runs"),
                 "model__path": str(folder / "model"), "model__load_format": "dummy"}  # fmt: skip
        self.configs = sweep(fixed, batch=[1, 4], tp=[1, 2])
        self.dying: tuple[str, ...] = ()
        self.submitted: list[list[str]] = []

    def submit(self, task: Any, jobs: Sequence[list[str]], folder: Path) -> Sequence[Any]:
        self.submitted.append([words[0].removeprefix("hydra.sweep.subdir=") for words in jobs])
        living = [words for words in jobs if not words[0].endswith(self.dying or ("none",))]
        returned = launcher._submit([], conf_folder(), None, task, living, folder)
        if len(living) < len(jobs):
            raise RuntimeError("Job 17 was lost:\n  node failure")
        return returned

    def run(self, **changes: Any) -> tuple[int, dict[str, Any]]:
        """-> exit status, the last line of stdout as JSON."""
        configs = [cfg | changes for cfg in self.configs]
        status = fan_out(configs, "submitit_slurm", self.submit, FUNCTIONS)
        return status, json.loads(self._capsys.readouterr().out.splitlines()[-1])

    def measured(self) -> int:
        return len(recorded("measured", self.folder))


def rows(run: str) -> list[tuple[int, int, str, str]]:
    """(tp, batch, status, reason) of each point of all jobs, in their order."""
    found = []
    for plan in sorted(Path(run).glob("job-*/*/plan.json")):
        points = load(plan.parent).points.sort_values("index")
        found += [
            (int(p["tp"]), int(p["batch"]), p["status"], p["reason"])
            for _, p in points.fillna({"reason": ""}).iterrows()
        ]
    return found


def raising(error: type[BaseException]) -> Any:
    def method(*_: Any) -> Any:
        raise error

    return method
