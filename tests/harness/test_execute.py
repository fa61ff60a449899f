"""Running a plan: engines started, rows written, what a failure costs and what a rerun does."""

from __future__ import annotations

import errno
import io
import json
import os
import re
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from harness import execute, runs
from harness.execute import Execution, units
from harness.plan import Plan, Point
from harness.runs import RunFolder, open_run
from harness.session import Outcome
from harness.storage import StorageError
from harness.worker import Functions
from tests.support.plans import plan, sweep

AXES = {
    "tp": [1, 2],
    "batch": [1, 4],
    "compile": ["off", "model"],
    "enforce_eager": [True, False],
}
Behaviour = Callable[[Point, int], str]


class FakeSession:
    """Stands for harness.session.Session and keeps a record of what every session did."""

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


@pytest.fixture(autouse=True)
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[FakeSession]:
    made: list[FakeSession] = []
    monkeypatch.setattr(FakeSession, "made", made, raising=False)
    monkeypatch.setattr(FakeSession, "behaviour", lambda point, process: "ok", raising=False)
    monkeypatch.setattr(FakeSession, "start_behaviour", lambda cfg, _: "ok", raising=False)
    monkeypatch.setattr(execute, "Session", FakeSession)
    return made


def write_status(out: Path, point: Point, process: int, run_id: str, outcome: Outcome) -> None:
    assert list(out.iterdir()) == [], "nothing half-written stays"
    (out / "points.parquet").write_text(f"{run_id} {outcome.status} {outcome.reason}")


def go(run: RunFolder, console: Console | None = None) -> tuple[bool, Execution]:
    execution = Execution(run, Functions(), write_status, run.path.parent / "warm")
    console = console or Console(file=io.StringIO())
    with execution.reporter(console) as reporter:
        return execution.go(reporter), execution


def statuses(run: RunFolder) -> list[str | None]:
    markers = [run.marker(point) for point in run.plan.points]
    return [marker.status if marker else None for marker in markers]


def eight(**fixed: Any) -> Plan:
    """Eight points on two engines."""
    return plan(sweep(fixed, tp=[1, 2], batch=[1, 2, 4, 8]))


@pytest.mark.parametrize("order", list(permutations(AXES))[::3], ids="-".join)
def test_starts_are_the_distinct_engines_for_axes_in_any_order(
    order: tuple[str, ...], tmp_path: Path, sessions: list[FakeSession]
) -> None:
    run = open_run(tmp_path, plan(sweep(**{axis: AXES[axis] for axis in order})), "auto")
    complete, execution = go(run)

    assert complete
    assert len(sessions) == execution.engine_starts == 4
    assert sorted((s.cfg["tp"], s.cfg["compile"]) for s in sessions) == [
        (1, "model"),
        (1, "off"),
        (2, "model"),
        (2, "off"),
    ]
    assert all(s.ended == "closed" and len(s.measured) == 2 for s in sessions)
    assert run.counts() == {"ok": 8, "skipped": 8}


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
            patch.setitem(globals(), "write_status", full)
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


def test_every_fresh_engine_of_a_point_leaves_rows_of_its_own(
    tmp_path: Path, sessions: list[FakeSession]
) -> None:
    configs = sweep({"measure__n_process": 3}, batch=[1, 2])
    configs += sweep({"measure__n_process": 3, "enforce_eager": False})
    configs += sweep({"measure__n_process": 2, "tp": 2})
    made = plan(configs)
    assert [(u.point.index, u.process) for u in units(made)] == [
        (0, 0), (1, 0), (2, 0), (3, 0), (0, 1), (1, 1), (3, 1), (0, 2), (1, 2)
    ]  # fmt: skip
    run = open_run(tmp_path, made, "auto")
    go(run)
    assert [len(s.measured) for s in sessions] == [2, 1, 2, 1, 2]
    assert [s.cfg["tp"] for s in sessions] == [1, 2, 1, 2, 1], "engines take turns"
    a, b, skipped, c = (p.point_id for p in made.points)
    assert sorted(p.name for p in (run.path / "points").iterdir()) == sorted(
        [a, f"{a}-1", f"{a}-2", b, f"{b}-1", f"{b}-2", skipped, c, f"{c}-1"]
    )
    assert run.counts() == {"ok": 3, "skipped": 1}


def test_compile_caches_are_fresh_for_every_engine_unless_asked_to_be_kept(
    tmp_path: Path, sessions: list[FakeSession]
) -> None:
    for cache in ("cold", "warm"):
        axes: dict[str, list[Any]] = {"tp": [1, 2], "page_size": [16, 32], "engine__seed": [0, 1]}
        run = open_run(tmp_path, plan(sweep({"cache": cache}, **axes)), "auto")
        go(run)
        run.close()
        assert not (run.path / "cache").exists()
    assert [s.found for s in sessions[:8]] == [[]] * 8, "each found the one before it gone"
    warm = [s.found for s in sessions[8:]]
    assert warm == [[], ["code of 9"], [], ["code of 11"], [], ["code of 13"], [], ["code of 15"]]
    kept = [s.cache for s in sessions[8:]]
    assert len({p.engine_key for p in run.plan.points}) == 8
    # The engine's seed, which is not in the key, changes no code.
    of_code = [(p.cfg["tp"], p.cfg["page_size"]) for p in run.plan.points]
    assert {path.parent for path in kept if path} == {tmp_path / "warm"}
    assert len(set(kept)) == 4 == len(set(zip(kept, of_code, strict=True)))


def test_plain_lines_where_there_is_no_terminal(tmp_path: Path) -> None:
    out = io.StringIO()
    run = open_run(tmp_path, plan(sweep(batch=[1, 2], enforce_eager=[True, False])), "auto")
    go(run, Console(file=out, width=40))
    lines = out.getvalue().splitlines()
    first, last = (rf"\[{n}/4\] batch={n} enforce_eager=true: ok \d+\.\d s" for n in (1, 2))
    assert re.match(rf"{first}, about \d+ s left", lines[0])
    assert re.fullmatch(last, lines[1]), "a skipped point takes no time"
    assert lines[3] == (
        "[4/4] batch=2 enforce_eager=false: skipped (CUDA graphs need a CUDA device; none visible)"
    )


def test_the_marker_of_a_point_says_how_it_ended(tmp_path: Path) -> None:
    run = open_run(tmp_path, plan(sweep(enforce_eager=[False])), "auto")
    go(run)
    (point,) = run.plan.points
    marker = json.loads((run.path / "points" / point.point_id / "point.json").read_text())
    assert (marker["point_id"], marker["process"]) == (point.point_id, 0)
    assert (marker["status"], marker["reason"]) == ("skipped", point.skip)
    assert list(marker["files"]) == ["points.parquet"]
