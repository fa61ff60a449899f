"""A sweep as jobs: an engine each, rows whatever becomes of them, and the same command goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.fanout.command import fan_out
from harness.fanout.folder import by_engine, list_jobs, open_fan_out
from harness.settings import launcher
from harness.settings.config import SettingsError
from harness.sweep.worker import Functions
from tests.support.fake_engine import FUNCTIONS, recorded
from tests.support.fan_outs import Sweep, raising, rows
from tests.support.plans import config, sweep


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
        fan_out([base], "ray", raising(AssertionError), Functions())
    if {"device", "tp"} & set(changes):
        with pytest.raises(launcher.SettingsError, match=message):
            list_jobs([base], "ray", None)
