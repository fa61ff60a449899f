"""Hydra's launchers for schedulers on this machine: submitit's local executor, a local Ray."""

from __future__ import annotations

import json
import os
import signal
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.cli import Cli
from tests.support.fake_engine import behave, recorded, wait_until


def needs(module: str) -> pytest.MarkDecorator:
    """Both are in the extra `test`; what lacks them was installed by hand."""
    reason = f"{module} is not installed; pip install -e '.[test]'"
    return pytest.mark.skipif(find_spec(module) is None, reason=reason)


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    monkeypatch.setenv("RANGEFINDER_LOCKS", str(tmp_path / "locks"))
    made = Cli(tmp_path)
    made.arguments += ["device=cpu"]
    return made


def said(folder: Path) -> str:
    """What the jobs have printed."""
    return "".join(file.read_text() for file in folder.glob("job-*/output.log"))


@needs("hydra_plugins.hydra_submitit_launcher")
def test_submitit_jobs_take_turns_and_a_killed_one_is_continued(cli: Cli) -> None:
    cli.arguments += ["hydra/launcher=submitit_local", "hydra.launcher.timeout_min=5"]
    behave(cli.folder, p2="hang")
    with cli.start() as process:
        cli.wait_for_point(2)
        (folder,) = cli.results.iterdir()
        assert wait_until(lambda: "waiting for cpu" in said(folder), 60)
        assert cli.measured() == [0, 1, 2], "the other job has the same machine and waits"
        behave(cli.folder)
        owner = (cli.folder / "locks" / "cpu").read_text()
        os.kill(int(owner.split()[1]), signal.SIGKILL)
        out, err = process.communicate(timeout=120)
    last = json.loads(out.splitlines()[-1])

    assert process.returncode == 1
    assert (last["jobs"], last["points"], last["ok"], last["error"]) == (2, 8, 6, 2)
    assert f"fan-out {folder}: 2 of 2 jobs by submitit_local" in err
    assert cli.measured() == [0, 1, 2, 0, 1, 2, 3]
    assert wait_until(lambda: not cli.living(), 60)

    status, again, err = cli.run()
    assert (status, again["run"], again["ok"], again["pending"]) == (0, str(folder), 8, 0)
    assert f"continuing fan-out {folder}: 1 of 2 jobs" in err
    assert cli.measured() == [0, 1, 2, 0, 1, 2, 3, 2, 3], "what has a row is not measured again"


@needs("hydra_plugins.hydra_ray_launcher")
def test_a_local_ray_runs_the_jobs_and_a_failing_point_fails_the_command(cli: Cli) -> None:
    behave(cli.folder, p3="raise")
    status, last, _ = cli.run(
        "hydra/launcher=ray", "+hydra.launcher.ray.init.num_cpus=2",
        "+hydra.launcher.ray.init.include_dashboard=false",
    )  # fmt: skip
    assert status == 1
    assert (last["jobs"], last["points"], last["ok"], last["error"]) == (2, 8, 6, 2)
    assert sorted(cli.measured()) == [0, 0, 1, 1, 2, 2, 3, 3]
    starts = [line.split()[:2] for line in recorded("starts", cli.folder)]
    assert sorted(starts) == [["1", "off"], ["2", "off"]]
    assert wait_until(lambda: not cli.living(), 60)
