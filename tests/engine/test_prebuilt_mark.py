"""The file that says that a cache holds a rank's kernels: where there is no folder for it yet, and
where it cannot be written."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine import prebuild
from engine.prebuild import prebuilding
from tests.support.plans import SHAPE

pytest.importorskip("triton")


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
    for name, found in (("current_device", 0), ("set_device", None)):
        monkeypatch.setattr(torch.cuda, name, lambda *args, found=found: found)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    done: list[int] = []
    monkeypatch.setattr(prebuild, "first_launches", lambda *args: [lambda: done.append(1)])
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / folder))
    config: Any = SimpleNamespace(threads_per_rank=2)
    for _ in range(2):
        with prebuilding(config, SHAPE, 0):
            pass
    assert len(done) == times
    said = "Not a directory; every start looks for its kernels"
    assert caplog.text.count(said) == (0 if times == 1 else 2)
    assert "as they are launched" not in caplog.text
