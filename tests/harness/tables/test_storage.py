"""Disks that are full or read-only, quotas, locks: an error that loses nothing finished."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from harness.planning.plan import Plan
from harness.planning.runs import RunFolder, open_run
from harness.settings.config import SettingsError
from harness.store import load
from harness.sweep import commands, execute
from harness.sweep.commands import run_points, write_status
from harness.sweep.execute import Execution
from harness.sweep.session import Outcome
from harness.sweep.worker import Functions
from harness.tables.storage import StorageError, storing
from tests.support.cli import Cli
from tests.support.direct_session import DirectSession
from tests.support.fake_engine import recorded, wait_until
from tests.support.plans import plan, sweep


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Plan:
    monkeypatch.setattr(execute, "Session", DirectSession)
    monkeypatch.setenv("FAKE_ENGINE", str(tmp_path))
    fixed = {"experiment": "made", "results_dir": str(tmp_path / "runs")}
    made = plan(sweep(fixed, batch=[1, 2, 4]))
    monkeypatch.setattr(commands, "make_plan", lambda configs: made)
    return made


def go(run: RunFolder) -> bool:
    execution = Execution(run, Functions(), write_status, run.path.parent / "warm")
    with execution.reporter(Console(file=io.StringIO())) as reporter:
        return execution.go(reporter)


@pytest.mark.parametrize(
    ("number", "to_do"),
    [
        (errno.ENOSPC, "make room on that disk, then"),
        (errno.EDQUOT, "free some of the quota, then"),
        (errno.EFBIG, r"raise the limit on the size of files \(ulimit -f\), then"),
        (errno.EROFS, "make it writable, then"),
        (errno.EACCES, "make it writable, then"),
        (errno.EIO, "once it can be,"),
    ],
)
def test_the_error_names_the_folder_and_what_to_do(number: int, to_do: str) -> None:
    said = f"^/runs/a cannot be written: {os.strerror(number)}; {to_do} the same command continues"
    with pytest.raises(StorageError, match=said), storing(Path("/runs/a")):
        raise OSError(number, os.strerror(number))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
@pytest.mark.parametrize("where", ["measure", "start"])
def test_a_point_that_failed_for_want_of_room_ends_the_sweep(
    tmp_path: Path, three: Plan, monkeypatch: pytest.MonkeyPatch, number: int, where: str
) -> None:
    """The row that says so would fit, but the points after it would fail in the same way."""
    reason = f"OSError: [Errno {number}] Error writing bytes to file: {os.strerror(number)}"
    whole = getattr(DirectSession, where)

    def full(self: DirectSession, *args: Any) -> Outcome:
        if where == "start" or args[0].index == 1:
            return Outcome("error", reason)
        outcome: Outcome = whole(self, *args)
        return outcome

    run = open_run(tmp_path, three, "auto")
    with monkeypatch.context() as patch:
        patch.setattr(DirectSession, where, full)
        with pytest.raises(
            StorageError, match=rf"{run.path} cannot be written: .*{number}.*, then"
        ):
            go(run)
    ended = {"ok": 1, "error": 1} if where == "measure" else {"error": 1}
    assert run.counts() == ended
    run.close()
    again = open_run(tmp_path, three, "auto")
    assert again.path == run.path and go(again)
    assert again.counts() == {"ok": 3}
    assert recorded("measured", tmp_path) == ["0", "1", "2"]


def test_the_mark_of_the_end_finds_no_room(
    three: Plan, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, value: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "mark_finished", lambda self: full(self.path, None))
        assert run_points([three.points[0].cfg]) == 1
    out, err = capsys.readouterr()
    first = json.loads(out.splitlines()[-1])
    assert first["ok"] == 3
    assert f"error: {first['run']} cannot be written: No space left on device; make room" in err

    assert run_points([three.points[0].cfg]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out.splitlines()[-1]) == first
    assert "3 of 3 points are there" in err
    assert (Path(first["run"]) / "finished.json").is_file()


def test_an_interrupt_while_tables_are_printed_leaves_them_to_the_same_command(
    tmp_path: Path,
    three: Plan,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And not a new sweep, which would measure all points once more."""

    def interrupt(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr("harness.tables.report.print_summary", interrupt)
        assert run_points([three.points[0].cfg]) == 130
    out, err = capsys.readouterr()
    first = json.loads(out.splitlines()[-1])
    assert first["ok"] == 3 and "interrupted; the same command continues this run" in err
    assert run_points([three.points[0].cfg]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out.splitlines()[-1]) == first and "3 of 3 points are there" in err
    assert out.count("\nok ") == 3 and recorded("measured", tmp_path) == ["0", "1", "2"]


@pytest.mark.parametrize("number", [errno.EDQUOT, errno.ENOLCK])
@pytest.mark.parametrize("call", ["open", "flock"])
def test_a_lock_that_cannot_be_had_leaves_no_folder(
    tmp_path: Path, three: Plan, monkeypatch: pytest.MonkeyPatch, number: int, call: str
) -> None:
    name = "os.open" if call == "open" else "fcntl.flock"
    real = getattr(os if call == "open" else fcntl, call)

    def refused(*args: Any, **more: Any) -> Any:
        if call == "open" and not str(args[0]).endswith("/lock"):
            return real(*args, **more)
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(name, refused)
        with pytest.raises(
            SettingsError, match=rf"no run can be kept there \({os.strerror(number)}"
        ):
            open_run(tmp_path / "runs", three, "auto")
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_run_that_cannot_be_continued_is_named_and_left(
    tmp_path: Path, three: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = open_run(tmp_path, three, "auto")
    mine.close()
    (mine.path / "lock").unlink()
    (mine.path / "lock").mkdir()
    run = open_run(tmp_path, three, "auto")
    assert run.path != mine.path and not run.continued
    assert run.notes == [f"{mine.path}: of this plan, but it cannot be continued (Is a directory)"]


@pytest.mark.parametrize("text", ["", "1", "own"])
def test_what_a_lock_file_holds_is_of_no_account(tmp_path: Path, three: Plan, text: str) -> None:
    """Only who has it open and locked counts, so that no number of a process is ever looked at."""
    run = open_run(tmp_path, three, "auto")
    run.close()
    (run.path / "lock").write_text(str(os.getpid()) if text == "own" else text)
    assert open_run(tmp_path, three, "auto").path == run.path


def test_one_command_twice_at_the_same_time(tmp_path: Path) -> None:
    """Each has a run of its own, and neither touches the other's."""
    cli = Cli(tmp_path, "tp=1")
    both = [cli.start() for _ in range(2)]
    lasts = []
    for process in both:
        out, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        lasts.append(json.loads(out.splitlines()[-1]))
    assert len({last["run"] for last in lasts}) == 2
    for last in lasts:
        assert (last["ok"], last["pending"]) == (4, 0)
        rows = load(last["run"]).points
        assert set(rows["run_id"]) == {Path(last["run"]).name} and len(rows) == 4
    assert sorted(cli.measured()) == sorted([*range(4), *range(4)])
    assert sorted(p.name for p in cli.results.iterdir()) == sorted(
        Path(last["run"]).name for last in lasts
    )


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of its own, 1 MB; `remount` changes it."""
    folder = tmp_path / "disk"
    folder.mkdir()
    options = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(options, capture_output=True)
    except FileNotFoundError:
        pytest.skip("there is no mount here")
    if mounted.returncode:
        pytest.skip(f"no disk can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def remount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True)


def test_a_disk_that_is_full_and_then_is_not(tmp_path: Path, disk: Path) -> None:
    cli = Cli(tmp_path, f"results_dir={disk}")
    (disk / "somebody's").write_bytes(bytes(790_000))  # what is left is enough for some points
    status, last, err = cli.run()
    assert status == 1
    assert 0 < last["ok"] < 7 and last["error"] == 1 and last["pending"] == 7 - last["ok"]
    assert "No space left on device" in err and "Traceback" not in err
    assert "make room on that disk, then the same command continues this run" in err
    assert len(load(last["run"]).points) == last["ok"], "what was finished can be read"
    first = cli.measured()

    remount(disk, "size=8m")
    status, again, _ = cli.run()
    assert (status, again["run"], again["ok"]) == (0, last["run"], 8)
    assert sorted(first + cli.measured()[len(first) :]) == sorted([*range(8), first[-1]])
    assert wait_until(lambda: not cli.left(), 60)


def test_a_disk_that_cannot_be_written(tmp_path: Path, disk: Path) -> None:
    cli = Cli(tmp_path, f"results_dir={disk}", "tp=1", "batch=1,2,4", "fail_fast=true")
    (tmp_path / "behaviour.json").write_text('{"p1": "raise"}')
    _, last, _ = cli.run()
    assert (last["ok"], last["error"], last["pending"]) == (1, 1, 1)
    (tmp_path / "behaviour.json").unlink()

    remount(disk, "ro")
    with cli.start() as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    assert err.startswith(f"error: results_dir={disk}: no run can be kept there (Read-only file")
    assert len(load(last["run"]).points) == 2

    remount(disk, "rw")
    status, again, _ = cli.run()
    assert (status, again["run"], again["ok"]) == (0, last["run"], 3)


def test_a_warm_cache_that_cannot_be_written_ends_the_command_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli = Cli(tmp_path)
    (cli.folder / "file").touch()
    monkeypatch.setenv("RANGEFINDER_CACHE", str(cli.folder / "file" / "cache"))
    with cli.start("cache=warm", "device=cpu") as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    assert err == (
        f"error: RANGEFINDER_CACHE={cli.folder}/file/cache: {cli.folder}/file/cache/compile cannot "
        "be written (Not a directory); set it to a folder that can\n"
    )
    assert not cli.results.exists()
