"""One engine in a child process: how it answers, how it fails, and that nothing of it is left."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from harness.sweep import session as session_module
from harness.sweep.session import Outcome, Session
from tests.support import fake_engine
from tests.support.fake_engine import FUNCTIONS, alive, behave, recorded, wait_until
from tests.support.plans import plan, sweep

POINTS = plan(sweep(batch=[1, 2, 4])).points


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FAKE_ENGINE", str(tmp_path))
    return tmp_path


def started(folder: Path) -> Session:
    session = Session(folder / "log", FUNCTIONS)
    assert session.start(POINTS[0].cfg, folder / "cache", 60) == Outcome("ok", engine_alive=True)
    return session


def measure(session: Session, folder: Path, index: int, timeout_s: float = 60) -> Outcome:
    out = folder / "run" / "points" / f"p{index}"
    out.mkdir(parents=True)
    return session.measure(POINTS[index], 0, out, timeout_s)


def nothing_left(folder: Path) -> bool:
    pids = [int(line) for line in recorded("processes", folder)]
    assert len(pids) >= 2
    return wait_until(lambda: not any(map(alive, pids)), 60)


def test_one_engine_measures_several_points_and_ends_in_order(folder: Path) -> None:
    before = time.perf_counter()
    session = started(folder)
    seen: list[str] = []
    session.on_progress = seen.append
    for index in range(3):
        assert measure(session, folder, index) == Outcome("ok", has_tables=True, engine_alive=True)
    session.close()
    session.close()

    assert recorded("starts", folder) == [f"1 off {folder / 'cache'}"]
    assert [line.split()[0] for line in recorded("measured", folder)] == ["0", "1", "2"]
    assert seen == ["warmup 1"] * 3
    assert recorded("closed", folder) == [recorded("processes", folder)[0]]
    (age,) = map(float, recorded("ages", folder))
    assert 0 < age < time.perf_counter() - before, "the start counts from the process's begin"
    assert (folder / "run" / "points" / "p2" / "points.parquet").is_file()
    assert nothing_left(folder)


def test_the_child_is_another_process_in_a_group_of_its_own(folder: Path) -> None:
    session = started(folder)
    assert session.pid != os.getpid()
    assert os.getpgid(session.pid) == session.pid != os.getpgid(0)
    session.kill()
    session.kill()
    assert nothing_left(folder)
    assert recorded("closed", folder) == []


def test_an_exception_comes_back_with_its_traceback(folder: Path) -> None:
    behave(folder, p1="raise")
    session = started(folder)
    assert measure(session, folder, 0).status == "ok"
    outcome = measure(session, folder, 1)
    session.kill()

    assert (outcome.status, outcome.engine_alive, outcome.has_tables) == ("error", False, False)
    assert outcome.reason == "RuntimeError: the fake engine was told to fail"
    assert outcome.traceback is not None
    assert 'fake_engine.py", line' in outcome.traceback
    assert nothing_left(folder)


FAILURES = {
    "memory": ("oom", "MemoryError: no memory for this batch"),
    "exit": ("error", "the engine's process ended with code 3"),
    "SIGSEGV": ("killed", "the engine's process was ended by SIGSEGV"),
    "SIGKILL": ("killed", "the engine's process was ended by SIGKILL"),
}


@pytest.fixture(autouse=True)
def _no_other_is_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel counts for all that it runs."""
    monkeypatch.setattr(session_module, "_kernel_oom_kills", lambda: 0)


@pytest.mark.parametrize("what", FAILURES)
def test_every_way_to_fail_has_a_status_and_a_reason_of_its_own(folder: Path, what: str) -> None:
    behave(folder, p0=what)
    session = started(folder)
    outcome = measure(session, folder, 0)
    session.kill()

    assert (outcome.status, outcome.reason) == FAILURES[what]
    assert not outcome.engine_alive
    if what.startswith("SIG"):
        assert outcome.traceback is not None
        assert "last words of the engine" in outcome.traceback
    assert nothing_left(folder), "a rank outlived the process that started it"


def test_a_kill_that_the_kernel_counts_as_out_of_memory_is_oom(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kills = iter([7, 8])
    monkeypatch.setattr(session_module, "_kernel_oom_kills", lambda: next(kills))
    behave(folder, p0="SIGKILL")
    session = started(folder)
    outcome = measure(session, folder, 0)
    session.kill()
    assert outcome.status == "oom"
    assert outcome.reason == "the kernel killed it: no memory left (SIGKILL)"


def test_a_point_that_takes_too_long_is_ended_and_says_where_it_was(folder: Path) -> None:
    behave(folder, p0="hang")
    session = started(folder)
    outcome = measure(session, folder, 0, timeout_s=8)
    session.kill()

    assert outcome.status == "timeout"
    assert outcome.reason == "measure.point_timeout_s=8 passed; last seen at: warmup 1"
    assert outcome.traceback is not None
    assert "in act" in outcome.traceback, "the stack of the thread that hangs"
    assert nothing_left(folder)


@pytest.mark.parametrize(("what", "status"), [("raise", "error"), ("hang", "timeout")])
def test_an_engine_that_does_not_start(folder: Path, what: str, status: str) -> None:
    behave(folder, start=what)
    session = Session(folder / "log", FUNCTIONS)
    outcome = session.start(POINTS[0].cfg, None, 60 if what == "raise" else 10)
    session.kill()
    assert outcome.status == status
    assert outcome.reason is not None
    assert outcome.reason.startswith("the engine did not start: ")
    assert nothing_left(folder)


def test_what_the_child_prints_goes_to_the_log(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    behave(folder, p0="SIGSEGV")
    session = started(folder)
    measure(session, folder, 0)
    session.kill()
    assert "last words of the engine" in (folder / "log").read_text()
    assert capfd.readouterr() == ("", "")


def test_the_fake_engine_can_tell_the_living_from_the_dead() -> None:
    assert fake_engine.alive(os.getpid())
    assert not fake_engine.alive(2**22 + 1)
