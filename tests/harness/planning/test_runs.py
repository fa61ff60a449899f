"""Run folders: never shared, locked while in use, continued only where the plan is the same."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from harness.machine.fingerprint import digest
from harness.planning import runs
from harness.planning.plan import Plan
from harness.planning.runs import RunFolder, open_run
from harness.settings.config import SettingsError
from harness.tables import marker
from tests.support.plans import SURROUNDINGS, plan, sweep


@pytest.fixture
def four() -> Plan:
    return plan(sweep({"experiment": "tp_sweep"}, tp=[1, 2], batch=[1, 4]))


def finish(run: RunFolder, index: int, status: str = "ok", process: int = 0) -> Path:
    point = run.plan.points[index]
    out = run.begin(point, process)
    (out / "points.parquet").write_bytes(b"rows of " + status.encode())
    run.finish(point, process, out, status=status, reason=None, wall_s=1.5)
    return run.path / "points" / runs.folder_name(point, process)


def status(run: RunFolder, index: int) -> str | None:
    marker = run.marker(run.plan.points[index])
    return marker.status if marker else None


def test_two_runs_of_the_same_second_have_folders_of_their_own(
    tmp_path: Path, four: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws = iter(["aaaaaa", "aaaaaa", "aaaaaa", "bbbbbb"])
    monkeypatch.setattr(runs.secrets, "token_hex", lambda n: next(draws))
    frozen = type("Frozen", (runs.datetime,), {"now": classmethod(lambda cls, tz: _NOON)})
    monkeypatch.setattr(runs, "datetime", frozen)

    first, second = open_run(tmp_path, four, "never"), open_run(tmp_path, four, "never")

    assert first.path.name == "tp_sweep-20260102-120000-aaaaaa"
    assert second.path.name == "tp_sweep-20260102-120000-bbbbbb"
    finish(first, 0)
    assert status(second, 0) is None


_NOON = runs.datetime.fromisoformat("2026-01-02T12:00:00+00:00")


def test_the_plan_is_on_disk_before_anything_runs(tmp_path: Path, four: Plan) -> None:
    run = open_run(tmp_path, four, "auto")
    stored = json.loads((run.path / "plan.json").read_text())
    assert stored["key"] == four.key
    assert [p["point_id"] for p in stored["points"]] == [p.point_id for p in four.points]
    assert stored["points"][3]["cfg"] == four.points[3].cfg
    assert stored["surroundings"] == SURROUNDINGS
    assert not run.continued


def test_auto_continues_the_newest_unfinished_run(tmp_path: Path, four: Plan) -> None:
    older, newer = open_run(tmp_path, four, "never"), open_run(tmp_path, four, "never")
    finish(newer, 0)
    older.close()
    newer.close()

    again = open_run(tmp_path, four, "auto")
    assert (again.path, again.continued) == (newer.path, True)
    assert [status(again, i) for i in range(4)] == ["ok", None, None, None]


def test_auto_takes_no_run_that_another_process_holds(tmp_path: Path, four: Plan) -> None:
    held = open_run(tmp_path, four, "auto")
    other = open_run(tmp_path, four, "auto")
    assert other.path != held.path
    assert not other.continued


def test_auto_takes_no_finished_run_and_none_of_another_plan(tmp_path: Path, four: Plan) -> None:
    done = open_run(tmp_path, four, "auto")
    done.mark_finished()
    done.close()
    open_run(tmp_path, plan(sweep({"experiment": "tp_sweep"}, tp=[1, 2])), "auto").close()

    run = open_run(tmp_path, four, "auto")
    assert run.path != done.path
    assert not run.continued


def test_never_is_always_new(tmp_path: Path, four: Plan) -> None:
    first = open_run(tmp_path, four, "auto")
    first.close()
    assert open_run(tmp_path, four, "never").path != first.path


def test_a_named_run_is_taken_up_even_if_finished(tmp_path: Path, four: Plan) -> None:
    first = open_run(tmp_path, four, "auto")
    finish(first, 1)
    first.mark_finished()
    first.close()
    for name in (first.path.name, str(first.path)):
        again = open_run(tmp_path, four, name)
        assert (again.path, status(again, 1)) == (first.path, "ok")
        assert not (again.path / "finished.json").exists(), "it is unfinished until its end"
        again.close()


def test_a_named_run_that_is_not_there_or_not_the_same_is_refused(
    tmp_path: Path, four: Plan
) -> None:
    with pytest.raises(SettingsError, match=r"resume=nothing: no such run in .*give its folder"):
        open_run(tmp_path, four, "nothing")
    run = open_run(tmp_path, four, "auto")
    with pytest.raises(SettingsError, match="another process is running it"):
        open_run(tmp_path, four, run.path.name)
    run.close()
    smaller = plan(sweep({"experiment": "tp_sweep"}, tp=[1, 2], batch=[4]))
    with pytest.raises(
        SettingsError, match="of another plan: 0 of 2 points are not in it, and 2 of"
    ):
        open_run(tmp_path, smaller, run.path.name)
    changed = {**SURROUNDINGS, "sources": "edited"}
    edited = plan(sweep({"experiment": "tp_sweep"}, tp=[1, 2], batch=[1, 4]), surroundings=changed)
    with pytest.raises(SettingsError, match="sources changed since; start a new one"):
        open_run(tmp_path, edited, run.path.name)


FOREIGN = ["[]", "5", "null", '"key"', '{"key": 3}', '{"key": "', "[" * 100_000, "\x00"]


@pytest.mark.parametrize("text", FOREIGN, ids=range(len(FOREIGN)))
def test_a_folder_that_is_no_run_is_passed_over_and_cannot_be_resumed(
    tmp_path: Path, four: Plan, text: str
) -> None:
    (tmp_path / "sibling").mkdir()
    (tmp_path / "sibling" / "plan.json").write_text(text)
    run = open_run(tmp_path, four, "auto")
    assert not run.continued
    run.close()
    assert open_run(tmp_path, four, "auto").path == run.path, "its own is found beside the other"
    with pytest.raises(SettingsError, match="resume=sibling: its plan.json is damaged.*resume=nev"):
        open_run(tmp_path, four, "sibling")
    assert [p.name for p in (tmp_path / "sibling").iterdir()] == ["plan.json"]


def test_a_truncated_plan_is_not_resumed(tmp_path: Path, four: Plan) -> None:
    run = open_run(tmp_path, four, "auto")
    run.close()
    file = run.path / "plan.json"
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(SettingsError, match="its plan.json is damaged"):
        open_run(tmp_path, four, str(run.path))


def test_results_that_cannot_be_kept_are_a_wrong_setting(
    tmp_path: Path, four: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    for folder, why in (("file", "File exists"), ("file/runs", "Not a directory")):
        for resume in ("auto", "never"):
            with pytest.raises(SettingsError, match=f"results_dir=.*{folder}: no run can.*{why}"):
                open_run(tmp_path / folder, four, resume)

    def full(path: Path, value: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(runs, "write_json", full)
    with pytest.raises(SettingsError, match="No space left on device"):
        open_run(tmp_path / "runs", four, "auto")
    assert list((tmp_path / "runs").iterdir()) == [], "no folder without a plan stays"


def test_a_json_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    file = tmp_path / "finished.json"
    marker.write_json(file, 1)
    full = OSError(errno.ENOSPC, "full")
    with (
        mock.patch.object(marker.os, "fsync", side_effect=full),
        pytest.raises(OSError, match="full"),
    ):
        marker.write_json(file, 2)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("finished.json", "1")]


def test_a_point_appears_whole_or_not_at_all(tmp_path: Path, four: Plan) -> None:
    run = open_run(tmp_path, four, "auto")
    out = run.begin(four.points[0])
    (out / "points.parquet").write_bytes(b"half")
    assert [p.name for p in (run.path / "points").glob("[!.]*")] == []
    run.close()

    again = open_run(tmp_path, four, "auto")
    assert again.continued
    assert list((again.path / "points").iterdir()) == [], "what was half-written is gone"


def edit(folder: Path, rehash: bool = False, **changes: Any) -> None:
    """Changes fields of point.json, with a hash that fits them if asked for."""
    file = folder / "point.json"
    stored = json.loads(file.read_text()) | changes
    if rehash:
        del stored["check"]
        stored["check"] = digest(stored, 16)
    file.write_text(json.dumps(stored))


DAMAGE: dict[str, Any] = {
    "a status by hand": lambda folder: edit(folder, status="contaminated"),
    "a time by hand": lambda folder: edit(folder, wall_s=0.1),
    "no such status": lambda folder: edit(folder, rehash=True, status="fine"),
    "a status of another type": lambda folder: edit(folder, rehash=True, status=["ok"]),
    "a point of another type": lambda folder: edit(folder, rehash=True, point_id=[1]),
    "files of another type": lambda folder: edit(folder, rehash=True, files=["points.parquet"]),
    "hashes of another type": lambda folder: edit(folder, rehash=True, files={"points.parquet": 1}),
    "files at null": lambda folder: edit(folder, rehash=True, files=None),
    "another point's marker": lambda folder: edit(folder, rehash=True, point_id="0" * 12),
    "a field too many": lambda folder: edit(folder, rehash=True, more=1),
    "null": lambda folder: (folder / "point.json").write_text("null"),
    "no text": lambda folder: (folder / "point.json").write_bytes(b"\xff\xfe"),
    "a table cut short": lambda folder: (folder / "points.parquet").write_bytes(b"rows"),
    "a table gone": lambda folder: (folder / "points.parquet").unlink(),
    "no marker": lambda folder: (folder / "point.json").unlink(),
    "half a marker": lambda folder: (folder / "point.json").write_text('{"point_id": "12'),
    "a marker of something else": lambda folder: (folder / "point.json").write_text("[1]"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_point_is_measured_again(tmp_path: Path, four: Plan, what: str) -> None:
    run = open_run(tmp_path, four, "auto")
    folder = finish(run, 0)
    finish(run, 1)
    assert status(run, 0) == "ok"
    DAMAGE[what](folder)
    assert [status(run, i) for i in (0, 1)] == [None, "ok"]
    assert run.counts() == {"ok": 1}

    finish(run, 0, "contaminated")
    assert status(run, 0) == "contaminated"
    assert sorted(p.name for p in (run.path / "points").iterdir()) == sorted(
        p.point_id for p in four.points[:2]
    )


def test_counts_take_the_worst_of_a_points_fresh_engines(tmp_path: Path, four: Plan) -> None:
    run = open_run(tmp_path, four, "auto")
    finish(run, 0)
    finish(run, 0, "timeout", process=1)
    finish(run, 1, "skipped")
    finish(run, 2, "contaminated")
    assert run.counts() == {"timeout": 1, "skipped": 1, "contaminated": 1}
    assert run.marker(four.points[0], 1) is not None


HOLD = """
import os, sys, time
from pathlib import Path
from harness.planning.runs import open_run
from tests.support.plans import plan, sweep
run = open_run(Path(sys.argv[1]), plan(sweep(dict(experiment="held"), tp=[1, 2])), "auto")
print(run.path, flush=True)
time.sleep(600)
"""


def test_the_lock_of_a_killed_process_is_free_at_once(tmp_path: Path) -> None:
    two = plan(sweep({"experiment": "held"}, tp=[1, 2]))
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        path = Path(holder.stdout.readline().strip())
        while_held = open_run(tmp_path, two, "auto")
        while_held.mark_finished()
        while_held.close()
        assert while_held.path != path
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
    assert open_run(tmp_path, two, "auto").path == path
