"""Sweeps whose whole command is killed before its n-th change of the file system.

    python -m tests.support.kills FOLDER SEED SWEEPS KILLS

One process imports everything and forks the commands, since a sweep of 24 points that are not
measured then takes a third of a second. It prints a line of JSON a sweep.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.planning.plan import Plan
from harness.sweep import commands, execute
from harness.sweep.commands import run_points
from tests.support import fake_engine
from tests.support.direct_session import DirectSession
from tests.support.plans import plan, sweep

CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def twenty_four(results: Path) -> Plan:
    """Points of four engines, one of which is skipped."""
    fixed = {"results_dir": str(results), "experiment": "killed"}
    axes: dict[str, list[Any]] = {"tp": [1, 2], "enforce_eager": [True, False]}
    return plan(sweep(fixed, **axes, batch=[1, 2, 3, 4, 5, 6]))


def count_changes(kill_at: int | None) -> Callable[[], int]:
    """Counts how often this process changes the file system from here on (makes, renames or removes
    something, or opens a file to write it); SIGKILL right before number `kill_at`, from 1."""
    seen = 0

    def count(event: str, args: tuple[Any, ...]) -> None:
        nonlocal seen
        if event in CHANGES or (event == "open" and args[2] & WRITING):
            seen += 1
            if seen == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    return lambda: seen


def command(made: Plan, kill_at: int | None) -> int | None:
    """Runs the sweep in a process of its own; -> its changes of the file system, or None if it was
    killed."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 1)
        os.dup2(null, 2)
        changes = count_changes(kill_at)
        status = run_points([made.points[0].cfg])
        os.write(write, f"{status} {changes()}".encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read().split()
    os.waitpid(child, 0)
    assert not said or said[0] == "0", said
    return int(said[1]) if said else None


def sweep_with_kills(folder: Path, kills: list[int]) -> dict[str, Any]:
    """The same command until it has ended, killed once for each of `kills` and then left alone.

    -> folder; kills: those that struck; changes: of the last command; again: indices of points
    that were measured though they had been finished.
    """
    folder.mkdir(parents=True)
    os.environ["FAKE_ENGINE"] = str(folder)
    results = folder / "runs"
    made = twenty_four(results)
    commands.make_plan = lambda configs: made  # type: ignore[assignment]
    index = {point.point_id: point.index for point in made.points}
    again: list[int] = []
    struck: list[int] = []
    for kill_at in [*kills, None]:
        there = {index[file.parent.name] for file in results.glob("*/points/[!.]*/point.json")}
        before = len(fake_engine.recorded("measured"))
        changes = command(made, kill_at)
        again += [int(i) for i in fake_engine.recorded("measured")[before:] if int(i) in there]
        if changes is not None:
            break
        assert kill_at is not None, "nobody killed the last one"
        struck.append(kill_at)
        if list(results.glob("*/finished.json")):
            break  # it had printed its tables
    return {"folder": str(folder), "kills": struck, "changes": changes, "again": again}


def main(folder: Path, seed: int, sweeps: int, kills: int) -> None:
    """An undisturbed sweep; `sweeps` that are killed once, at numbers evenly over all its changes;
    and as many that are killed up to `kills` times, at numbers drawn."""
    import pandas  # noqa: F401
    import pyarrow.parquet  # noqa: F401

    import harness.sweep.point
    import harness.tables.report  # noqa: F401

    execute.Session = DirectSession  # type: ignore[assignment,misc]
    undisturbed = sweep_with_kills(folder / "undisturbed", [])
    print(json.dumps(undisturbed), flush=True)
    changes = undisturbed["changes"]
    draw = random.Random(seed)
    step = max(1, changes // sweeps)
    once = [[number] for number in range(draw.randint(1, step), changes + 1, step)]
    often = [[draw.randint(1, changes // 3) for _ in range(kills)] for _ in range(sweeps)]
    for place, numbers in enumerate(once + often):
        print(json.dumps(sweep_with_kills(folder / str(place), numbers)), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:5]))
