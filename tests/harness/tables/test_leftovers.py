"""What stands in a run's folder and is not of it: found, named, kept aside, and measured again."""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from rich.console import Console

from harness.machine.fingerprint import digest
from harness.planning.plan import Plan
from harness.planning.runs import RunFolder, open_run
from harness.store import load
from harness.sweep import execute
from harness.sweep.commands import write_status
from harness.sweep.execute import Execution
from harness.sweep.worker import Functions
from tests.support.direct_session import DirectSession
from tests.support.plans import plan, sweep


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Plan:
    monkeypatch.setattr(execute, "Session", DirectSession)
    monkeypatch.setenv("FAKE_ENGINE", str(tmp_path))
    return plan(sweep({"experiment": "made"}, batch=[1, 2, 4]))


def go(run: RunFolder) -> tuple[list[int], str]:
    """Runs what is missing; -> the indices measured, what was said of the folder."""
    out = io.StringIO()
    execution = Execution(run, Functions(), write_status, run.path.parent / "warm")
    DirectSession.measured.clear()
    with execution.reporter(Console(file=out)) as reporter:
        assert execution.go(reporter)
    said = [line for line in out.getvalue().splitlines() if not line.startswith("[")]
    return list(DirectSession.measured), "\n".join(said)


def finished(results: Path, made: Plan) -> Path:
    """A run of the plan, all of whose points are there; it is not marked as finished."""
    run = open_run(results, made, "never")
    assert go(run) == ([0, 1, 2], "")
    run.close()
    return run.path


def whole(run: Path, made: Plan) -> None:
    """The run holds each point of the plan once, and readers see nothing else."""
    rows = load(run).points
    assert sorted(rows["point_id"]) == sorted(p.point_id for p in made.points)
    assert set(rows["run_id"]) == {run.name}
    assert len(load(run).metrics) == len(made.points)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-20])


def newer(file: Path) -> None:
    table = pq.read_table(file)
    pq.write_table(table.replace_schema_metadata({"schema_version": "99"}), file)


def remark(folder: Path, **changes: object) -> None:
    """point.json with other fields and a hash that fits them."""
    stored = json.loads((folder / "point.json").read_text()) | changes
    del stored["check"]
    (folder / "point.json").write_text(json.dumps({**stored, "check": digest(stored, 16)}))


def as_folder(file: Path) -> None:
    file.unlink()
    (file / "inside").mkdir(parents=True)


def replaced_by_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("something else")


Damage = Callable[[Path, Path], object]
"""(folder of the run's second point, that of another point of another run)."""
DAMAGE: dict[str, tuple[Damage, str]] = {
    "a table cut short": (
        lambda mine, other: truncate(mine / "metrics.parquet"),
        "metrics.parquet is not as it was written",
    ),
    "an empty table": (
        lambda mine, other: (mine / "metrics.parquet").write_bytes(b""),
        "metrics.parquet is not as it was written",
    ),
    "a table of another point": (
        lambda mine, other: shutil.copy(other / "points.parquet", mine),
        "points.parquet is not as it was written",
    ),
    "a table too many": (
        lambda mine, other: shutil.copy(other / "points.parquet", mine / "steps.parquet"),
        "steps.parquet was added",
    ),
    "a table of a newer version": (
        lambda mine, other: newer(mine / "points.parquet"),
        "points.parquet is not as it was written",
    ),
    "a table gone": (
        lambda mine, other: (mine / "metrics.parquet").unlink(),
        "metrics.parquet is missing",
    ),
    "a folder for a table": (
        lambda mine, other: as_folder(mine / "metrics.parquet"),
        "metrics.parquet cannot be read ([Errno 21] Is a directory",
    ),
    "tables without a status": (
        lambda mine, other: (mine / "point.json").unlink(),
        "it has no point.json",
    ),
    "a status without tables": (
        lambda mine, other: ([f.unlink() for f in mine.glob("*.parquet")], remark(mine, files={})),
        "point.json is not as it was written",
    ),
    "a status of no file": (
        lambda mine, other: as_folder(mine / "point.json"),
        "point.json cannot be read ([Errno 21] Is a directory",
    ),
    "half a status": (
        lambda mine, other: truncate(mine / "point.json"),
        "point.json cannot be read (",
    ),
    "a status by hand": (
        lambda mine, other: remark(mine, status="fine"),
        "point.json is not as it was written",
    ),
    "a point of another run": (
        lambda mine, other: (shutil.rmtree(mine), shutil.copytree(other, mine)),
        "it is of the run made-",
    ),
    "another point of this run": (
        lambda mine, other: remark(mine, point_id="0" * 12),
        "it is of the point 000000000000",
    ),
    "another engine of the point": (
        lambda mine, other: remark(mine, process=3),
        "-3, so it is measured again",
    ),
    "a file for the point's folder": (
        lambda mine, other: replaced_by_file(mine),
        "point.json cannot be read ([Errno 20] Not a directory",
    ),
    "an empty folder": (
        lambda mine, other: (shutil.rmtree(mine), mine.mkdir()),
        "it has no point.json",
    ),
    "a link to nowhere": (
        lambda mine, other: (shutil.rmtree(mine), mine.symlink_to("nowhere")),
        "it has no point.json",
    ),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_what_is_not_the_point_is_set_aside_and_measured_again(
    tmp_path: Path, three: Plan, what: str
) -> None:
    other = finished(tmp_path / "runs", three) / "points" / three.points[2].point_id
    path = finished(tmp_path / "runs", three)
    mine = path / "points" / three.points[1].point_id
    damage, why = DAMAGE[what]
    damage(mine, other)
    left = os.lstat(mine).st_ino

    run = open_run(tmp_path / "runs", three, path.name)
    measured, said = go(run)
    run.close()

    aside = path / "set-aside" / f"{mine.name}.1"
    assert measured == [1]
    assert said.startswith(f"{mine}: ") and said.endswith(f"it is now {aside}")
    assert why in said and "so it is measured again" in said
    assert os.lstat(aside).st_ino == left, "nothing of it was deleted"
    whole(path, three)


def test_what_is_set_aside_twice_is_kept_twice(tmp_path: Path, three: Plan) -> None:
    path = finished(tmp_path, three)
    mine = path / "points" / three.points[0].point_id
    for _ in range(2):
        truncate(mine / "points.parquet")
        run = open_run(tmp_path, three, "auto")
        assert run.path == path and go(run)[0] == [0]
        run.close()
    assert sorted(p.name for p in (path / "set-aside").iterdir()) == [
        f"{mine.name}.{n}" for n in "12"
    ]


def test_foreign_folders_among_the_points_are_set_aside(tmp_path: Path, three: Plan) -> None:
    path = finished(tmp_path, three)
    foreign = path / "points" / "0123456789ab"
    shutil.copytree(path / "points" / three.points[0].point_id, foreign)
    assert len(load(path).points) == 4
    profile = path / "points" / f"{three.points[0].point_id}-nsys"
    profile.mkdir()
    (path / "points" / ".DS_Store").touch()

    run = open_run(tmp_path, three, "auto")
    aside = path / "set-aside" / f"{foreign.name}.1"
    assert go(run) == ([], f"{foreign}: no point of this plan; it is now {aside}")
    assert (aside / "point.json").is_file()
    assert profile.is_dir() and (path / "points" / ".DS_Store").is_file()
    whole(path, three)


def test_what_was_half_written_is_removed_and_said(tmp_path: Path, three: Plan) -> None:
    path = finished(tmp_path, three)
    first = path / "points" / three.points[0].point_id
    halves = [first.with_name(f".old-{first.name}"), first.with_name(f".tmp-{first.name}-77")]
    first.rename(halves[0])
    halves[1].touch()
    run = open_run(tmp_path, three, "auto")
    ended = "half-written by a command that was ended; removed"
    assert go(run) == ([0], "\n".join(f"{half}: {ended}" for half in halves))
    whole(path, three)


@pytest.mark.parametrize("name", ["points", "logs", "cache"])
@pytest.mark.parametrize("what", ["gone", "file"])
def test_a_folder_that_is_none_is_made_again(
    tmp_path: Path, three: Plan, name: str, what: str
) -> None:
    path = finished(tmp_path, three)
    shutil.rmtree(path / name, ignore_errors=True)
    if what == "file":
        (path / name).write_text("kept")
    run = open_run(tmp_path, three, "auto")
    measured, said = go(run)
    assert measured == ([0, 1, 2] if name == "points" else [])
    aside = path / "set-aside" / f"{name}.1"
    assert said == (f"{path / name}: no folder; it is now {aside}" if what == "file" else "")
    assert what == "gone" or aside.read_text() == "kept"
    assert (path / "logs").is_dir()
    whole(path, three)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"counts": 3}', None])
def test_a_damaged_mark_of_the_end_is_none(tmp_path: Path, three: Plan, text: str | None) -> None:
    path = finished(tmp_path, three)
    file = path / "finished.json"
    file.mkdir() if text is None else file.write_text(text)
    run = open_run(tmp_path, three, "auto")
    aside = path / "set-aside" / "finished.json.1"
    assert (run.path, go(run)) == (path, ([], f"{file}: it cannot be read; it is now {aside}"))
    run.mark_finished()
    run.close()
    assert open_run(tmp_path, three, "auto").path != path


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00", None])
def test_a_run_whose_plan_cannot_be_read_is_named_and_left(
    tmp_path: Path, three: Plan, text: str | None
) -> None:
    path = finished(tmp_path, three)
    file = path / "plan.json"
    file.unlink()
    file.mkdir() if text is None else file.write_text(text)
    (tmp_path / "somebody's").mkdir()
    (tmp_path / "somebody's" / "plan.json").touch()
    before = sorted(path.rglob("*"))
    run = open_run(tmp_path, three, "auto")
    said = f"{file} cannot be read, so nothing in its folder is used"
    assert go(run) == ([0, 1, 2], said)
    assert run.path != path and sorted(path.rglob("*")) == before


def test_a_run_that_was_renamed_is_continued(tmp_path: Path, three: Plan) -> None:
    path = finished(tmp_path, three)
    renamed = path.rename(tmp_path / "kept")
    shutil.rmtree(renamed / "points" / three.points[2].point_id)
    run = open_run(tmp_path, three, "auto")
    assert (run.path, go(run)) == (renamed, ([2], ""))
    assert run.counts() == {"ok": 3}


def test_a_point_damaged_while_the_run_goes_on_is_set_aside(tmp_path: Path, three: Plan) -> None:
    path = finished(tmp_path, three)
    run = open_run(tmp_path, three, "auto")
    mine = path / "points" / three.points[1].point_id
    truncate(mine / "points.parquet")
    measured, said = go(run)
    aside = path / "set-aside" / f"{mine.name}.1"
    assert (measured, said) == ([1], f"{mine}: not as this run wrote it; it is now {aside}")
    whole(path, three)
