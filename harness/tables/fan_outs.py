"""The run folders below a fan-out, and those of a folder of runs: which of them count"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from harness.tables.leftovers import is_finished

JOBS = "jobs.json"
"""The file by which a folder is known to be a fan-out's."""


def is_fan_out(folder: Path) -> bool:
    return (folder / JOBS).is_file()


def runs_below(folder: Path) -> list[Path]:
    """The run of each job of a fan-out that counts."""
    return [run for job in sorted(folder.glob("job-*")) for run in that_counts(job)]


def expanded(folders: Iterable[Path]) -> list[Path]:
    """The folders, with its runs in the place of a fan-out."""
    return [run for one in folders for run in (runs_below(one) if is_fan_out(one) else [one])]


def runs_of(job: Path) -> list[Path]:
    return [file.parent for file in sorted(job.glob("*/plan.json"))]


def that_counts(job: Path) -> list[Path]:
    """Of a job's runs the one that its last attempt finished, else the newest; none if there is
    none. Each has all of the job's points, in the others as another machine measured them."""
    runs = runs_of(job)
    return ([run for run in runs if is_finished(run)] or runs)[-1:]


def runs_in(folder: Path) -> list[Path]:
    """The folder itself if it is a run's, else the runs and fan-outs in it."""
    if (folder / "points").is_dir():
        return [folder]
    below = sorted(folder.glob("[!.]*"))
    return [
        one for one in below if (one / "points").is_dir() or (is_fan_out(one) and runs_below(one))
    ]
