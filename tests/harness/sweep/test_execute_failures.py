"""Running a plan whose points or engines fail: what a failure costs the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.planning.runs import open_run
from tests.support.executions import eight, go, statuses
from tests.support.fake_session import FakeSession
from tests.support.plans import plan, sweep

pytestmark = pytest.mark.usefixtures("sessions")


def test_a_failing_point_costs_no_other_points_rows(
    tmp_path: Path, sessions: list[FakeSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = {2: "error", 5: "oom"}
    monkeypatch.setattr(FakeSession, "behaviour", lambda point, _: failing.get(point.index, "ok"))
    run = open_run(tmp_path, eight(), "auto")
    complete, _ = go(run)

    assert complete
    assert statuses(run) == ["ok", "ok", "error", "ok", "ok", "oom", "ok", "ok"]
    for index, status in failing.items():
        folder = run.path / "points" / run.plan.points[index].point_id
        assert (folder / "traceback.txt").read_text() == f"Traceback: {index}"
        assert (folder / "points.parquet").read_text().endswith(f"{status} {status} of {index}")
        assert sorted(p.name for p in folder.iterdir()) == [
            "point.json",
            "points.parquet",
            "traceback.txt",
        ]
    assert [s.ended for s in sessions] == ["killed", "closed", "killed", "closed"]
    assert [[p.index for p in s.measured] for s in sessions] == [[0, 1, 2], [3], [4, 5], [6, 7]]
    caches = [s.cache for s in sessions]
    assert all(cache == run.path / "cache" for cache in caches)


def test_an_engine_that_is_still_sound_measures_the_next_point(
    tmp_path: Path, sessions: list[FakeSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = {1: "short", 2: "contaminated"}
    monkeypatch.setattr(FakeSession, "behaviour", lambda point, _: odd.get(point.index, "ok"))
    run = open_run(tmp_path, plan(sweep(batch=[1, 2, 4, 8])), "auto")
    go(run)
    assert statuses(run) == ["ok", "error", "contaminated", "ok"]
    assert len(sessions) == 1


def test_a_failure_on_the_last_point_of_an_engine_starts_no_further_one(
    tmp_path: Path, sessions: list[FakeSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        FakeSession, "behaviour", lambda point, _: "timeout" if point.index == 3 else "ok"
    )
    run = open_run(tmp_path, eight(), "auto")
    go(run)
    assert statuses(run)[2:5] == ["ok", "timeout", "ok"]
    assert len(sessions) == 2


def test_an_engine_that_does_not_start_fails_its_points_and_no_others(
    tmp_path: Path, sessions: list[FakeSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        FakeSession, "start_behaviour", lambda cfg, _: "oom" if cfg["tp"] == 1 else "ok"
    )
    run = open_run(tmp_path, eight(), "auto")
    complete, _ = go(run)
    assert complete
    assert statuses(run) == ["oom"] * 4 + ["ok"] * 4
    assert [s.ended for s in sessions] == ["killed", "closed"]
    marker = run.marker(run.plan.points[3])
    assert marker is not None
    assert marker.reason == "start: oom"


def test_fail_fast_stops_at_the_first_failure_and_keeps_the_rows(
    tmp_path: Path, sessions: list[FakeSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        FakeSession, "behaviour", lambda point, _: "error" if point.index in (2, 5) else "ok"
    )
    run = open_run(tmp_path, eight(fail_fast=True), "auto")
    complete, _ = go(run)
    assert not complete
    assert statuses(run) == ["ok", "ok", "error", None, None, None, None, None]
    assert not (run.path / "finished.json").exists()
    assert [s.ended for s in sessions] == ["killed"]
