"""What ends a sweep or a point early: fail_fast and time limits, alone and together"""

from __future__ import annotations

from harness.store import load
from tests.support.cli import Cli
from tests.support.fake_engine import behave, recorded, wait_until

FOUR = ("tp=1", "batch=1,2,4,8")
SHORT = "measure.point_timeout_s=10"


def statuses(run: str) -> list[str]:
    return list(load(run).points.sort_values("index")["status"])


def test_a_point_that_hangs_ends_as_timeout_and_the_next_one_runs(cli: Cli) -> None:
    behave(cli.folder, p1="hang")
    status, last, _ = cli.run(*FOUR, SHORT)
    assert (status, last["ok"], last["timeout"], last["pending"]) == (1, 3, 1, 0)
    assert statuses(last["run"]) == ["ok", "timeout", "ok", "ok"]
    row = load(last["run"]).points.set_index("index").loc[1]
    assert row["reason"] == "measure.point_timeout_s=10 passed; last seen at: warmup 1"
    assert len(recorded("starts", cli.folder)) == 2, "a fresh engine behind the one that hung"
    assert wait_until(lambda: not cli.living(), 60)


def test_fail_fast_stops_behind_a_timeout_and_the_same_command_goes_on(cli: Cli) -> None:
    behave(cli.folder, p1="hang")
    status, last, err = cli.run(*FOUR, SHORT, "fail_fast=true")
    assert (status, last["ok"], last["timeout"], last["pending"]) == (1, 1, 1, 2)
    assert statuses(last["run"]) == ["ok", "timeout"]
    assert "stopped by fail_fast; the same command continues this run" in err
    assert wait_until(lambda: not cli.living(), 60)

    behave(cli.folder)
    status, again, _ = cli.run(*FOUR, SHORT, "fail_fast=true")
    assert (status, again["run"], again["ok"], again["pending"]) == (0, last["run"], 4, 0)
    assert cli.measured() == [0, 1, 1, 2, 3]


def test_without_fail_fast_the_run_that_it_stopped_goes_past_the_failure(cli: Cli) -> None:
    behave(cli.folder, p1="raise")
    _, last, _ = cli.run(*FOUR, "fail_fast=true")
    assert (last["ok"], last["error"], last["pending"]) == (1, 1, 2)
    status, again, _ = cli.run(*FOUR, "fail_fast=false")
    assert (status, again["run"], again["ok"], again["error"]) == (1, last["run"], 3, 1)


def test_fail_fast_stops_behind_an_engine_that_does_not_start(cli: Cli) -> None:
    behave(cli.folder, start="raise")
    status, last, _ = cli.run(*FOUR, "fail_fast=true")
    assert (status, last["error"], last["pending"]) == (1, 1, 3)
    assert len(recorded("starts", cli.folder)) == 1
