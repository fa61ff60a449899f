"""Jobs that fail, die, are killed or go on elsewhere: rows whatever becomes of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.__main__ import conf_folder
from harness.fanout.command import fan_out
from harness.fanout.folder import Job
from harness.machine.fingerprint import surroundings
from harness.settings import launcher
from harness.store import load
from harness.tables.fan_outs import runs_below
from harness.tables.storage import try_lock
from tests.support.fake_engine import FUNCTIONS, behave
from tests.support.fan_outs import Sweep, raising, rows


def test_the_end_of_each_attempt_is_told_once(
    jobs: Sweep, capsys: pytest.CaptureFixture[str]
) -> None:
    statuses = iter((1, 0, 1, 0))

    def submit(task: Any, words: Sequence[list[str]], folder: Path) -> list[SimpleNamespace]:
        """Jobs in no process of their own, which plan nothing."""
        returned = []
        for (word,) in words:
            job = Job(folder / word.removeprefix("hydra.sweep.subdir="), [])
            job.begin()
            returned.append(SimpleNamespace(_return_value=next(statuses)))
            job.end(returned[-1]._return_value)
        return returned

    told = []
    for _ in range(3):
        fan_out(jobs.configs, "submitit_slurm", submit, FUNCTIONS)
        said = capsys.readouterr().err.splitlines()
        told.append([line for line in said if "has ended" in line])
    assert told == [
        ["job-000 has ended with status 1 (1 of 2)", "job-001 has ended with status 0 (2 of 2)"],
        ["job-000 has ended with status 1 (1 of 1)"],
        ["job-000 has ended with status 0 (1 of 1)"],
    ]


def test_a_failing_point_fails_the_command_and_its_job_alone_is_submitted_again(
    jobs: Sweep,
) -> None:
    behave(jobs.folder, p1="raise", start="")
    jobs.configs = [cfg for cfg in jobs.configs if (cfg["tp"], cfg["batch"]) != (2, 4)]
    status, last = jobs.run()
    assert (status, last["ok"], last["error"]) == (1, 2, 1)
    assert rows(last["run"])[1] == (1, 4, "error", "RuntimeError: the fake engine was told to fail")


def test_points_of_a_job_that_died_are_errors_that_say_why_and_others_keep_theirs(
    jobs: Sweep,
) -> None:
    class Killed(BaseException):
        """In the place of the end of the process."""

    plain = jobs.submit

    def kill_second(task: Any, words: Sequence[list[str]], folder: Path) -> Sequence[Any]:
        plain(task, words[:1], folder)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("harness.sweep.execute.Execution._measure", raising(Killed))
            with pytest.raises(Killed):
                launcher._submit([], conf_folder(), None, task, words[1:], folder)
        raise RuntimeError("Job 17 was lost:\n  node failure")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs, "submit", kill_second)
        status, last = jobs.run()
    assert status == 1
    assert (last["ok"], last["error"], last["pending"]) == (2, 2, 0)
    assert rows(last["run"])[:2] == [(1, 1, "ok", ""), (1, 4, "ok", "")]
    reason = "the job died: Job 17 was lost: node failure"
    assert rows(last["run"])[2:] == [(2, 1, "error", reason), (2, 4, "error", reason)]

    status, again = jobs.run()
    assert (status, again["run"], again["ok"]) == (0, last["run"], 4)
    assert jobs.submitted[-1] == ["job-001"]
    assert jobs.measured() == 4, "nothing is measured twice"


def test_a_job_that_never_began_leaves_its_points_pending(
    jobs: Sweep, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs.dying = ("job-001",)
    status = fan_out(jobs.configs, "submitit_slurm", jobs.submit, FUNCTIONS)
    said = capsys.readouterr()
    last = json.loads(said.out.splitlines()[-1])
    assert (status, last["ok"], last["error"], last["pending"]) == (1, 2, 0, 2)
    assert "error: submitit_slurm: Job 17 was lost: node failure" in said.err
    assert "job-001 has planned no points" in said.err
    jobs.dying = ()
    status, again = jobs.run()
    assert (status, again["run"], again["ok"]) == (0, last["run"], 4)
    assert jobs.submitted == [["job-000", "job-001"], ["job-001"]]


def test_a_job_that_goes_on_at_another_machine_has_its_points_once(
    jobs: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There its points are measured anew, and the first machine's count and stand no more."""
    behave(jobs.folder, p1="raise")
    jobs.configs = [jobs.configs[0] | {"batch": batch} for batch in (1, 4, 8)]
    status, last = jobs.run(fail_fast=True)
    assert (status, last["ok"], last["error"], last["pending"]) == (1, 1, 1, 1)
    behave(jobs.folder)
    elsewhere = {**surroundings(), "hardware": "another"}
    monkeypatch.setattr("harness.sweep.commands.surroundings", lambda: elsewhere)
    status, again = jobs.run(fail_fast=True)
    assert (status, again["run"], again["ok"], again["error"]) == (0, last["run"], 3, 0)
    assert (again["points"], again["pending"]) == (3, 0)
    assert len(list(Path(last["run"]).glob("job-000/*/plan.json"))) == 2
    (counted,) = runs_below(Path(last["run"]))
    assert list(load(counted).points["status"]) == ["ok"] * 3
    assert jobs.run(fail_fast=True)[1]["run"] != last["run"], "it is finished"


def test_fail_fast_leaves_a_fan_out_to_be_continued(jobs: Sweep) -> None:
    behave(jobs.folder, p0="raise")
    status, last = jobs.run(fail_fast=True)
    assert (status, last["error"], last["pending"]) == (1, 2, 2)
    behave(jobs.folder)
    status, again = jobs.run(fail_fast=True)
    assert (status, again["run"], again["ok"]) == (0, last["run"], 4)


def test_a_command_that_was_killed_as_its_jobs_ended_prints_their_tables(jobs: Sweep) -> None:
    _, last = jobs.run()
    (Path(last["run"]) / "finished.json").unlink()
    (jobs.folder / "runs" / "foreign").mkdir()
    (jobs.folder / "runs" / "foreign" / "jobs.json").write_text("[")
    assert jobs.run() == (0, last)
    assert jobs.submitted == [["job-000", "job-001"]]


def test_a_job_that_another_process_measures_is_not_measured_twice(
    jobs: Sweep, capsys: pytest.CaptureFixture[str]
) -> None:
    def submit(task: Any, words: Sequence[list[str]], folder: Path) -> Sequence[Any]:
        lock = try_lock(folder / "job-001")
        assert lock is not None
        return launcher._submit([], conf_folder(), None, task, words, folder)

    assert fan_out(jobs.configs, "ray", submit, FUNCTIONS) == 1
    said = capsys.readouterr()
    assert "job-001: another process measures this job" in said.err
    assert json.loads(said.out.splitlines()[-1])["pending"] == 2
    assert jobs.measured() == 2
