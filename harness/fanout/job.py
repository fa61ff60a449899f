"""What a job of a fan-out does in the process that a launcher has started for it"""

from __future__ import annotations

import os
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from harness.fanout.folder import OUTPUT, read_job
from harness.tables.storage import try_lock


def measure_job(_: Any) -> int:
    """Hydra's task: plans the job's points on the machine where it runs, and measures them into run
    folders of its own; -> exit status of the run.

    Repeatable: a job that a scheduler starts again, or that a later command submits again, goes on
    with the run it finds.

    Raises:
        RuntimeError: another process holds the job.
    """
    from hydra.core.hydra_config import HydraConfig

    from harness.sweep.commands import run_points

    folder = Path(HydraConfig.get().runtime.output_dir)
    job, functions = read_job(folder)
    lock = try_lock(folder)
    if lock is None:
        raise RuntimeError(f"{folder}: another process measures this job; wait for it or end it")
    try:
        job.begin()
        for mark in folder.glob("*/finished.json"):
            mark.unlink()  # a run whose failed points are to be measured again
        settings = {"results_dir": str(folder), "resume": "auto"}
        # Ray would print it among the submitting command's own lines, some of it after the last.
        with (
            (folder / OUTPUT).open("a", buffering=1, encoding="utf-8") as output,
            redirect_stdout(output),
            redirect_stderr(output),
        ):
            status = run_points([cfg | settings for cfg in job.configs], functions)
        if status != 130:
            job.end(status)
        return status
    finally:
        os.close(lock)
