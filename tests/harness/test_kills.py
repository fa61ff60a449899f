"""A sweep of 24 points that is killed, at any moment and repeatedly, ends as an undisturbed one."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from harness.store import load
from harness.tables.schema import TABLES
from tests.support.cli import REAL, ROOT, Cli
from tests.support.fake_engine import recorded, wait_until

SWEEPS = int(os.environ.get("RANGEFINDER_KILLS", "0"))
"""Sweeps of each kind, and a tenth as many whose engines are processes too; 0: a few of each."""
SEED = 7
TWENTY_FOUR = ("batch=1,2,3,4,5,6,7,8,9,10,11,12",)


def tables(run: Path) -> dict[str, Any]:
    """What must not depend on kills: the points with their statuses and repeats, in the order of
    the plan, and how many rows each table has of each of them."""
    results = load(run)
    rows = results.points.sort_values(["index", "process", "repeat"])
    assert set(rows["run_id"]) == {run.name}
    found: dict[str, Any] = {
        "rows": rows[["point_id", "process", "repeat", "status"]].values.tolist()
    }
    for name in TABLES:
        counts = results.table(name, ["point_id"])["point_id"].value_counts()
        found[name] = counts.sort_index().to_dict()
    return found


def the_run(folder: Path) -> Path:
    """The only run with a plan; a command killed while it made its folder leaves one without."""
    (file,) = (folder / "runs").glob("*/plan.json")
    assert (file.parent / "finished.json").is_file()
    assert not (file.parent / "set-aside").exists(), "nothing foreign was there"
    return file.parent


@pytest.mark.timeout(300 + 20 * SWEEPS)
def test_before_any_change_of_the_file_system(tmp_path: Path) -> None:
    """SIGKILL before the n-th file is made, opened for writing, renamed or removed: once for each
    of some n over the whole sweep, and several times during one sweep."""
    words = [str(tmp_path / "sweeps"), str(SEED), str(SWEEPS or 3), "3"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.kills", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert done.returncode == 0, done.stderr
    undisturbed, *killed = map(json.loads, done.stdout.splitlines())
    expected = tables(the_run(Path(undisturbed["folder"])))
    assert len(expected["rows"]) == 24
    assert [row[3] for row in expected["rows"]] == (["ok"] * 6 + ["skipped"] * 6) * 2
    for one in killed:
        assert one["again"] == [], one
        assert tables(the_run(Path(one["folder"]))) == expected, one
    assert sum(len(one["kills"]) for one in killed) > 2 * (SWEEPS or 3)


class Killer:
    """Ends a command after a drawn part of the time that a whole one takes, or its engine alone."""

    def __init__(self, cli: Cli, seed: int, whole_s: float) -> None:
        self.cli, self.draw, self.whole_s = cli, random.Random(seed), whole_s

    def kill(self) -> None:
        """SIGKILL to the command; nothing of it may be left 10 s later."""
        with self.cli.start() as process:
            time.sleep(self.draw.uniform(0.2, 1.0) * self.whole_s)
            process.kill()
            process.communicate()
        assert wait_until(lambda: not self.cli.left(), 60), self.cli.left()

    def kill_engine(self, at: int) -> tuple[int, dict[str, Any], str]:
        """SIGKILL to the process that holds the engine, once point `at` has begun."""
        with self.cli.start() as process:
            self.cli.wait_for_point(at)
            os.kill(int(recorded("processes", self.cli.folder)[-2]), signal.SIGKILL)
            out, err = process.communicate(timeout=120)
        return process.returncode, json.loads(out.splitlines()[-1]), err


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, float]:
    """What an undisturbed command leaves, the setting of its model, how many seconds it takes."""
    cli = Cli(tmp_path_factory.mktemp("undisturbed"), *TWENTY_FOUR)
    begin = time.monotonic()
    status, last, _ = cli.run()
    assert (status, last["points"], last["ok"]) == (0, 24, 24)
    took_s = time.monotonic() - begin
    return tables(the_run(cli.folder)), f"model.path={cli.folder / 'model'}", took_s


def finished_points(folder: Path) -> set[int]:
    """Indices of the points that are in place."""
    found = set()
    for file in folder.glob("runs/*/plan.json"):
        for point in json.loads(file.read_text())["points"]:
            if (file.parent / "points" / point["point_id"] / "point.json").is_file():
                found.add(int(point["index"]))
    return found


@pytest.mark.parametrize("seed", range(max(1, SWEEPS // 10)))
def test_at_any_moment(
    tmp_path: Path, undisturbed: tuple[dict[str, Any], str, float], seed: int
) -> None:
    """Commands in processes, with their engines and ranks, killed twice during one sweep."""
    expected, model, whole_s = undisturbed
    cli = Cli(tmp_path, *TWENTY_FOUR, model)
    killer = Killer(cli, seed, whole_s)
    for _ in range(2):
        if list(tmp_path.glob("runs/*/finished.json")):
            break
        before, done = len(cli.measured()), finished_points(tmp_path)
        killer.kill()
        assert not done & set(cli.measured()[before:]), "a finished point was measured again"
    if not list(tmp_path.glob("runs/*/finished.json")):
        before, done = len(cli.measured()), finished_points(tmp_path)
        status, last, _ = cli.run()
        assert (status, last["ok"], last["pending"]) == (0, 24, 0)
        assert not done & set(cli.measured()[before:])
    assert tables(the_run(tmp_path)) == expected
    assert cli.left() == []


def test_the_engine_alone(tmp_path: Path, undisturbed: tuple[dict[str, Any], str, float]) -> None:
    """It costs the point at work, which says so, and no other; naming the run measures it again."""
    expected, model, _ = undisturbed
    cli = Cli(tmp_path, *TWENTY_FOUR, model)
    (tmp_path / "behaviour.json").write_text('{"p8": "hang"}')
    status, last, _ = Killer(cli, SEED, 0).kill_engine(8)
    assert (status, last["ok"], last["pending"]) == (1, 23, 0)
    rows = load(last["run"]).points.set_index("index")
    assert rows.loc[8, "reason"] == "the engine's process was ended by SIGKILL"

    (tmp_path / "behaviour.json").unlink()
    status, last, _ = cli.run(f"resume={last['run']}")
    assert (status, last["ok"]) == (0, 24)
    assert sorted(cli.measured()) == sorted([*range(24), 8])
    assert tables(the_run(tmp_path)) == expected
    assert cli.left() == []


def test_ranks_end_though_command_and_engine_are_killed_at_once(tmp_path: Path) -> None:
    """The real engine on two ranks, in the middle of a point: nobody is left to end the ranks."""
    cli = Cli(tmp_path, "tp=2", "batch=1", "device=cpu", "measure.min_repeats=1000000",
              "measure.max_repeats=1000000", "measure.wall_limit_s=600",
              "engine.threads_per_rank=1", "workload.prompt_tokens=8")  # fmt: skip
    with cli.start(program=REAL) as process:
        assert wait_until(lambda: any(tmp_path.glob("runs/*/points/.tmp-*")), 120)
        time.sleep(1)
        others = [pid for pid in cli.left() if pid != process.pid]
        (engine,) = (pid for pid in others if os.getpgid(pid) == pid)
        assert sum(os.getpgid(pid) == engine for pid in others) >= 3, "the engine and two ranks"
        os.kill(engine, signal.SIGSTOP)  # so that it cannot end its ranks when its parent goes
        process.kill()
        os.kill(engine, signal.SIGKILL)
        process.communicate()
    assert wait_until(lambda: not cli.left(), 60), cli.left()
