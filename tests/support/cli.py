"""The command line as a user has it, with the fake engine in the place of the real one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness.machine.models import TINY
from tests.support.fake_engine import alive, recorded, wait_until

ROOT = Path(__file__).resolve().parents[2]
FAKE = "import sys; from tests.support.fake_engine import main; sys.exit(main(sys.argv[1:]))"
REAL = "import sys; from harness.__main__ import main; sys.exit(main(sys.argv[1:]))"
SECRET = "hf_thisIsNobodysBusiness"
"""A token in the environment of every command, which no file may hold."""


class Cli:
    """`python -m harness ...` with the fake engine, eight points on two engines unless told."""

    def __init__(self, folder: Path, *further: str) -> None:
        """`further`: settings of every command, besides the two axes or in their place."""
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.results = folder / "runs"
        model = folder / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps({"model_type": "qwen3", **TINY}))
        self.arguments = ["tp=1,2", "batch=1,2,4,8", f"results_dir={self.results}",
                          f"model.path={model}", "model.load_format=dummy", *further]  # fmt: skip

    def start(self, *further: str, before: str = "", program: str = FAKE) -> subprocess.Popen[str]:
        """`before`: a statement that the process runs first; `program`: FAKE or REAL engine."""
        env = {**os.environ, "FAKE_ENGINE": str(self.folder), "HF_TOKEN": SECRET}
        return subprocess.Popen(
            [sys.executable, "-c", before + program, *self.arguments, *further],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *further: str) -> tuple[int, dict[str, Any], str]:
        """-> exit status, the last line of stdout as JSON, stderr."""
        with self.start(*further) as process:
            out, err = process.communicate(timeout=280)
        return process.returncode, json.loads(out.splitlines()[-1]), err

    def measured(self) -> list[int]:
        return [int(line.split()[0]) for line in recorded("measured", self.folder)]

    def living(self) -> list[int]:
        return [pid for pid in map(int, recorded("processes", self.folder)) if alive(pid)]

    def left(self) -> list[int]:
        """Every process that was started with this folder, by whomever, and runs."""
        mine = f"FAKE_ENGINE={self.folder}".encode()
        found = []
        for file in Path("/proc").glob("[0-9]*/environ"):
            try:
                if mine in file.read_bytes().split(b"\0"):
                    found.append(int(file.parent.name))
            except OSError:  # it has ended, or is another user's
                continue
        return [pid for pid in found if alive(pid)]

    def wait_for_point(self, index: int) -> None:
        assert wait_until(lambda: index in self.measured(), 90)


def points(run: str) -> dict[int, dict[str, Any]]:
    """point.json by the index of the point in plan.json."""
    plan = json.loads((Path(run) / "plan.json").read_text())
    found = {}
    for point in plan["points"]:
        file = Path(run) / "points" / point["point_id"] / "point.json"
        if file.is_file():
            found[point["index"]] = json.loads(file.read_text())
    return found
