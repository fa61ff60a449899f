"""The file that says that a cache holds a rank's kernels: without a folder for it, where it cannot
be written, and where a kernel was built at the second try."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.execution import prebuild
from engine.execution.prebuild import prebuilding
from tests.support.plans import SHAPE

pytest.importorskip("triton")


CONFIG: Any = SimpleNamespace(threads_per_rank=2)


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, found in (("current_device", 0), ("set_device", None)):
        monkeypatch.setattr(torch.cuda, name, lambda *args, found=found: found)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))


@pytest.mark.parametrize(("folder", "times"), [("new/cache", 1), ("file/cache", 2)])
def test_a_folder_is_made_and_one_that_cannot_be_is_said(
    folder: str,
    times: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A rank without kernels of its own comes before there is a folder; and kernels loaded from a
    cache that cannot be written were not built as they were launched."""
    done: list[int] = []
    monkeypatch.setattr(prebuild, "first_launches", lambda *args: [lambda: done.append(1)])
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / folder))
    for _ in range(2):
        with prebuilding(CONFIG, SHAPE, 0):
            pass
    assert len(done) == times
    said = "Not a directory; every start looks for its kernels"
    assert caplog.text.count(said) == (0 if times == 1 else 2)
    assert "as they are launched" not in caplog.text


def test_what_fails_beside_others_is_tried_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tried: list[str] = []

    def build() -> None:
        tried.append(threading.current_thread().name)
        if len(tried) == 1:
            raise SystemError("AST constructor recursion depth mismatch (before=117, after=96)")

    monkeypatch.setattr(prebuild, "first_launches", lambda *args: [build])
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for _ in range(2):  # the second start finds the mark
        with prebuilding(CONFIG, SHAPE, 0):
            pass
    assert len(tried) == 2 and tried[0].startswith("prebuild")
    assert tried[1] == threading.current_thread().name
    assert not caplog.text
