"""A sweep as jobs: an engine each, rows whatever becomes of them, and the same command goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.__main__ import conf_folder
from harness.fanout import command
from harness.fanout.command import fan_out
from harness.fanout.folder import Job, by_engine, list_jobs, open_fan_out
from harness.machine.fingerprint import surroundings
from harness.machine.models import TINY
from harness.settings import launcher
from harness.settings.config import SettingsError, register
from harness.store import load
from harness.sweep.worker import Functions
from harness.tables.fan_outs import runs_below
from harness.tables.storage import try_lock
from tests.support.fake_engine import FUNCTIONS, behave, recorded
from tests.support.plans import config, sweep

Submit = Callable[[Callable[[Any], int], Sequence[list[str]], Path], Sequence[Any]]


class Sweep:
    """Four points on two engines, as two jobs. Hydra's own basic launcher runs them in this
    process, one after the other, but for those in `dying`, in which it raises."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        register()
        (folder / "model").mkdir()
        text = json.dumps({"model_type": "qwen3", **TINY})
        (folder / "model" / "config.json").write_text(text)
        fixed = {"device": "cpu", "results_dir": str(folder / "runs"),
                 "model__path": str(folder / "model"), "model__load_format": "dummy"}  # fmt: skip
        self.configs = sweep(fixed, batch=[1, 4], tp=[1, 2])
        self.dying: tuple[str, ...] = ()
        self.submitted: list[list[str]] = []

    def submit(self, task: Any, jobs: Sequence[list[str]], folder: Path) -> Sequence[Any]:
        self.submitted.append([words[0].removeprefix("hydra.sweep.subdir=") for words in jobs])
        living = [words for words in jobs if not words[0].endswith(self.dying or ("none",))]
        returned = launcher._submit([], conf_folder(), None, task, living, folder)
        if len(living) < len(jobs):
            raise RuntimeError("Job 17 was lost:\n  node failure")
        return returned

    def run(self, **changes: Any) -> tuple[int, dict[str, Any]]:
        """-> exit status, the last line of stdout as JSON."""
        configs = [cfg | changes for cfg in self.configs]
        status = fan_out(configs, "submitit_slurm", self.submit, FUNCTIONS)
        return status, json.loads(self._capsys.readouterr().out.splitlines()[-1])

    _capsys: pytest.CaptureFixture[str]

    def measured(self) -> int:
        return len(recorded("measured", self.folder))


@pytest.fixture
def jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Sweep:
    monkeypatch.setenv("FAKE_ENGINE", str(tmp_path))
    monkeypatch.setattr(command, "START_S", 0.0)
    made = Sweep(tmp_path)
    made._capsys = capsys
    return made


def rows(run: str) -> list[tuple[int, int, str, str]]:
    """(tp, batch, status, reason) of each point of all jobs, in their order."""
    found = []
    for plan in sorted(Path(run).glob("job-*/*/plan.json")):
        points = load(plan.parent).points.sort_values("index")
        found += [
            (int(p["tp"]), int(p["batch"]), p["status"], p["reason"])
            for _, p in points.fillna({"reason": ""}).iterrows()
        ]
    return found


def test_a_job_has_the_points_of_one_engine_in_the_order_of_the_axes() -> None:
    configs = sweep(batch=[1, 4], tp=[1, 2], enforce_eager=[True, False])
    groups = by_engine(configs)
    assert [[(g["tp"], g["enforce_eager"], g["batch"]) for g in group] for group in groups] == [
        [(1, True, 1), (1, True, 4)],
        [(1, False, 1), (1, False, 4)],
        [(2, True, 1), (2, True, 4)],
        [(2, False, 1), (2, False, 4)],
    ]


def test_every_point_has_a_row_in_the_run_of_its_job(jobs: Sweep) -> None:
    status, last = jobs.run()

    assert status == 0
    assert last == {
        "run": last["run"], "jobs": 2, "points": 4, "ok": 4, "skipped": 0, "contaminated": 0,
        "error": 0, "oom": 0, "timeout": 0, "killed": 0, "pending": 0,
    }  # fmt: skip
    assert rows(last["run"]) == [(t, b, "ok", "") for t in (1, 2) for b in (1, 4)]
    assert len(recorded("starts", jobs.folder)) == 2
    assert jobs.run()[1]["run"] != last["run"], "a finished one is not continued"


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


def test_jobs_of_tp_sizes_have_one_limit_whatever_a_rule_leaves_out(jobs: Sweep) -> None:
    rules = [{"when": {"tp": 2, "batch": 4}, "reason": "two cores"}]
    rules += [{"when": {"batch": 16}, "reason": "out of memory"}]
    jobs.configs += [{**cfg, "batch": 16} for cfg in jobs.configs[:2]]
    groups = open_fan_out([{**cfg, "skip": rules} for cfg in jobs.configs], FUNCTIONS).jobs
    limits = [
        (cfg["tp"], cfg["batch"], cfg["engine"]["max_num_seqs"])
        for job in groups
        for cfg in job.configs
    ]
    assert limits == [(1, 1, 4), (1, 4, 4), (1, 16, None), (2, 1, 4), (2, 4, 4), (2, 16, None)]


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
            patch.setattr("harness.sweep.execute.Execution._measure", _raises(Killed))
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


def _raises(error: type[BaseException]) -> Any:
    def method(*_: Any) -> Any:
        raise error

    return method


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


def test_two_commands_at_once_have_folders_of_their_own(jobs: Sweep) -> None:
    first = open_fan_out(jobs.configs, FUNCTIONS)
    second = open_fan_out(jobs.configs, FUNCTIONS)
    assert (first.continued, second.continued, first.path != second.path) == (False, False, True)
    first.close()
    assert open_fan_out(jobs.configs, FUNCTIONS).path == first.path
    assert open_fan_out(
        [cfg | {"resume": "never"} for cfg in jobs.configs], FUNCTIONS
    ).path not in (
        first.path,
        second.path,
    )


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


def test_jobs_of_a_command_that_torchrun_started_are_refused(
    jobs: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SettingsError, match="hydra/launcher=ray under torchrun: .* one or the"):
        fan_out(jobs.configs, "ray", None, FUNCTIONS)  # type: ignore[arg-type]
    assert not list(jobs.folder.glob("runs/*"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "auto"}, "device=auto with hydra/launcher=ray: .* give device=cuda or device"),
        ({"tp": 0}, "tp=0: give at least 1"),
        ({"resume": "runs/x"}, "resume=runs/x: with a launcher give auto, .* or never"),
        ({"results_dir": "/proc/none"}, "results_dir=/proc/none: no fan-out can be kept there"),
    ],
)
def test_what_cannot_stand_is_refused_before_anything_is_submitted(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(launcher.SettingsError, match=message):
        base = config(device="cpu", results_dir=str(tmp_path)) | changes
        fan_out([base], "ray", _raises(AssertionError), Functions())
    if {"device", "tp"} & set(changes):
        with pytest.raises(launcher.SettingsError, match=message):
            list_jobs([base], "ray", None)
