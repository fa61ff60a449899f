"""`list` of a sweep as jobs: a line an engine, and its settings."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from harness.__main__ import conf_folder
from harness.fanout.folder import list_jobs
from harness.settings import launcher
from harness.settings.config import register
from tests.support.plans import sweep


def test_list_prints_the_jobs(capsys: pytest.CaptureFixture[str]) -> None:
    register()
    words = ["tp=1,2", "batch=1,4", "hydra/launcher=fake"]
    cpu = {"device": "cpu"}
    assert list_jobs(sweep(cpu, tp=[1, 2], batch=[1, 4]), "fake", None) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[:2] for line in lines[:2]] == [
        ["job-000", "2 points"], ["job-001", "2 points"],
    ]  # fmt: skip
    assert "tp=2 enforce_eager=true" in lines[1]
    configs = sweep(cpu | {"backend": "vllm"}, batch=[1])
    configs += sweep(cpu, engine__fused=["none", "store"])
    assert list_jobs(configs, "fake", None) == 0
    found = [line.split("  ")[2] for line in capsys.readouterr().out.splitlines()[:3]]
    assert [text.split()[0] for text in found] == ["backend=vllm", "backend=native",
                                                           "backend=native"]  # fmt: skip
    assert ["engine.fused=store" in text for text in found] == [False, False, True]
    assert lines[2] == "4 points in 2 jobs by fake"
    assert launcher.run(words, conf_folder(), partial(_unreachable), None) == 1
    assert "rangefinder[cluster]" in capsys.readouterr().err


def _unreachable(_: Any) -> int:
    raise AssertionError
