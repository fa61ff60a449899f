"""Running a plan again after an interrupt, a full disk or failures: what is measured, what kept."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from harness.planning import runs
from harness.planning.runs import open_run
from harness.tables.storage import StorageError
from tests.support import executions
from tests.support.executions import eight, go, statuses
from tests.support.fake_session import FakeSession

pytestmark = pytest.mark.usefixtures("sessions")


def test_an_interrupted_run_ends_its_engine_and_is_continued(
    tmp_path: Path, sessions: list[FakeSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        FakeSession, "behaviour", lambda point, _: "interrupt" if point.index == 5 else "ok"
    )
    run = open_run(tmp_path, eight(), "auto")
    with pytest.raises(KeyboardInterrupt):
        go(run)
    assert [s.ended for s in sessions] == ["closed", "killed"]
    run.close()
    before = {p.name: p.stat().st_mtime_ns for p in (run.path / "points").glob("[!.]*")}
    assert len(before) == 5

    monkeypatch.setattr(FakeSession, "behaviour", lambda point, _: "ok")
    again = open_run(tmp_path, eight(), "auto")
    assert again.path == run.path
    complete, _ = go(again)
    assert complete
    assert [[p.index for p in s.measured] for s in sessions[2:]] == [[5, 6, 7]]
    after = {p.name: p.stat().st_mtime_ns for p in (run.path / "points").iterdir()}
    assert len(after) == 8
    assert before.items() <= after.items(), "what was there was not touched"


@pytest.mark.parametrize("step", ["mkdir", "tables", "marker", "rename"])
def test_a_full_disk_loses_nothing_that_is_finished(
    tmp_path: Path, sessions: list[FakeSession], monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Whatever write of point 2 finds no room: it counts as an error, the run stops, the engine is
    ended, and a later run takes it up there."""
    monkeypatch.setattr(
        FakeSession,
        "behaviour",
        lambda point, _: "error" if (point.index, step) == (2, "tables") else "ok",
    )
    run = open_run(tmp_path, eight(), "auto")
    third = run.plan.points[2].point_id

    def full(*args: Any, **more: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def unless_third(plain: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *a, **k: (full if third in f"{a}" else plain)(*a, **k)

    console = Console(file=io.StringIO())
    with monkeypatch.context() as patch:
        if step == "mkdir":
            patch.setattr(Path, "mkdir", unless_third(Path.mkdir))
        elif step == "rename":
            patch.setattr(Path, "rename", unless_third(Path.rename))
        elif step == "marker":
            patch.setattr(runs, "write_marker", unless_third(runs.write_marker))
        else:
            patch.setattr(executions, "write_status", full)
        with pytest.raises(StorageError, match="cannot be written: No space left .*; make room on"):
            go(run, console)
    assert [s.ended for s in sessions] == ["killed"]
    assert statuses(run) == ["ok", "ok", *[None] * 6]
    assert run.counts() == {"ok": 2, "error": 1}
    assert "[3/8] tp=1 batch=4: error (" in console.file.getvalue()  # type: ignore[attr-defined]
    assert sorted(p.name for p in (run.path / "points").iterdir()) == sorted(
        p.point_id for p in run.plan.points[:2]
    )
    run.close()

    monkeypatch.setattr(FakeSession, "behaviour", lambda point, _: "ok")
    again = open_run(tmp_path, eight(), "auto")
    assert again.path == run.path and go(again)[0]
    assert [p.index for s in sessions[1:] for p in s.measured] == [2, 3, 4, 5, 6, 7]
    assert again.counts() == {"ok": 8}


def test_a_continued_run_measures_failed_points_again_and_keeps_the_others(
    tmp_path: Path, sessions: list[FakeSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = {0: "error", 1: "contaminated", 2: "oom", 3: "timeout"}
    monkeypatch.setattr(FakeSession, "behaviour", lambda point, _: first.get(point.index, "ok"))
    run = open_run(tmp_path, eight(), "auto")
    go(run)
    run.close()
    del sessions[:]

    monkeypatch.setattr(FakeSession, "behaviour", lambda point, _: "ok")
    again = open_run(tmp_path, eight(), run.path.name)
    go(again)
    assert [p.index for s in sessions for p in s.measured] == [0, 2, 3]
    assert statuses(again) == ["ok", "contaminated", "ok", "ok", "ok", "ok", "ok", "ok"]
