"""An engine that does what a file tells it, so that sessions and runs are tested without a model.

The folder $FAKE_ENGINE holds `behaviour.json` ({point index: what happens there}) and the record of
what was done: `starts`, `measured`, `closed`, `processes`. Children find the folder by the
variable, which they inherit.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from engine.errors import EngineDeadError
from harness.planning.plan import Point
from harness.sweep.worker import Functions

FUNCTIONS = Functions(
    create="tests.support.fake_engine:FakeEngine", measure="tests.support.fake_engine:measure"
)

WATCHDOG = (
    "[rank1]:[E1130 03:10:00 ProcessGroupNCCL.cpp:689] [Rank 1] Watchdog caught collective "
    "operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, Timeout(ms)=300000) ran for 300017 "
    "milliseconds before timing out."
)


@dataclass(frozen=True)
class FakeOutcome:
    status: str
    reason: str | None = None
    engine_alive: bool = True


def folder() -> Path:
    return Path(os.environ["FAKE_ENGINE"])


def record(name: str, line: str) -> None:
    with (folder() / name).open("a") as file:
        file.write(f"{line}\n")


def recorded(name: str, root: Path | None = None) -> list[str]:
    path = (root or folder()) / name
    return path.read_text().split("\n")[:-1] if path.exists() else []


def behave(root: Path, **behaviour: str) -> None:
    """behave(root, p2="raise", start="raise"): what happens at the point of index 2, at a start."""
    (root / "behaviour.json").write_text(json.dumps(behaviour))


def behaviour(key: str) -> str:
    path = folder() / "behaviour.json"
    return str(json.loads(path.read_text()).get(key, "")) if path.exists() else ""


def act(what: str) -> None:
    if what == "raise":
        raise RuntimeError("the fake engine was told to fail")
    if what == "memory":
        raise MemoryError("no memory for this batch")
    if what == "assertion":
        raise AssertionError("a page was freed twice")
    if what == "watchdog":  # what NCCL's does to a rank, as its parent hears of it
        print(WATCHDOG, file=sys.stderr, flush=True)
        raise EngineDeadError(1, -signal.SIGABRT)
    if what == "exit":
        os._exit(3)
    if what in ("SIGKILL", "SIGSEGV"):
        print("last words of the engine", flush=True)
        os.kill(os.getpid(), getattr(signal, what))
    if what == "hang":
        time.sleep(600)


class FakeEngine:
    """Starts one `rank`, a process that would outlive it for ten minutes if nobody ended it."""

    def __init__(self, name: str) -> None:
        record("backends", name)

    def start(self, cfg: dict[str, Any], cache_dir: str | None, since_s: float) -> None:
        record("ages", f"{time.perf_counter() - since_s}")
        record("starts", f"{cfg['tp']} {cfg['compile']} {cache_dir}")
        self.rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        record("processes", f"{os.getpid()}")
        record("processes", f"{self.rank.pid}")
        act(behaviour("start"))

    def close(self) -> None:
        self.rank.kill()
        self.rank.wait()
        record("closed", str(os.getpid()))


def measure(
    backend: FakeEngine,
    point: Point,
    out_dir: Path,
    progress: Callable[[str], None],
    process: int = 0,
) -> FakeOutcome:
    what = behaviour(f"p{point.index}")  # first: who sees the record may tell the next engine
    record("measured", f"{point.index} {process} {os.getpid()}")
    progress("warmup 1")
    (out_dir / "half-written").write_text("x")
    act(what)
    (out_dir / "half-written").unlink()
    status = what or "ok"
    write_tables(point, out_dir, status, process)
    return FakeOutcome(status)


def write_tables(point: Point, out_dir: Path, status: str, process: int = 0) -> None:
    """One row of points and one figure, both made up."""
    from harness.tables.point_files import write_point

    key = {"run_id": out_dir.parent.parent.name, "point_id": point.point_id, "process": process}
    row = {**key, **point.axes, "index": point.index, "repeat": 0, "status": status,
           "requested": json.dumps(point.cfg)}  # fmt: skip
    figure = {**key, "name": "output_tok_s", "stat": "mean", "value": 100.0, "unit": "1/s", "n": 1,
              "n_process": 1, "source": "host", "pass": "plain"}  # fmt: skip
    tables = {
        name: {column: [value] for column, value in one.items()}
        for name, one in (("points", row), ("metrics", figure))
    }
    write_point(out_dir, tables)


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended but was not reaped does not."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return False
    return fields[0] != "Z"


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether the condition came true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def main(arguments: list[str]) -> int:
    """`python -m harness ARGUMENTS` with this engine in the place of the real one."""
    from harness.__main__ import conf_folder
    from harness.fanout.command import fan_out
    from harness.settings.launcher import run
    from harness.sweep.commands import run_points

    measure = partial(run_points, functions=FUNCTIONS)
    return run(arguments, conf_folder(), measure, partial(fan_out, functions=FUNCTIONS))
