"""Shows what a verdict is worth on this machine: A/A comparisons, and a planted slow-down.

    python scripts/aa_check.py [--runs 7] [--engines 8] [--tries 1] [--minutes N] [--keep DIR]
        [SETTING=...]

Measures one point in --runs runs one after the other, each of --engines fresh engines, and compares
every two of them, 21 comparisons of 7: the same code, so FASTER and SLOWER are false alarms. (Each
run is in six of the 21, so one that is apart raises several.) Behind the first run comes one whose
engines wait after each step for a tenth of the step's time, which must be SLOWER wherever engines
alike differ by clearly less than that (the floor of the comparison). Where they differ by more, a
verdict cannot tell: up to --tries such pairs are measured until one can. All are printed. After
--minutes no further run or pair begins. SETTINGs are those of the harness; the planted delay needs
tp=1, and on a GPU engine.overlap=false. Prints markdown; exit status 0 if there was a comparison,
at most one in twenty raised an alarm, and the slow-down was found.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import tempfile
import time
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from harness.__main__ import conf_folder  # noqa: E402
from harness.judging import cells, repeats  # noqa: E402
from harness.judging.compare import view  # noqa: E402
from harness.judging.verdict import Judgement, Verdict  # noqa: E402
from harness.settings import launcher  # noqa: E402
from harness.settings.arguments import count, positive  # noqa: E402
from harness.settings.words import quoted  # noqa: E402
from harness.sweep.commands import run_points  # noqa: E402
from harness.sweep.worker import Functions  # noqa: E402
from harness.tables.console import markdown_table  # noqa: E402

if TYPE_CHECKING:
    import pandas as pd

DELAY = 0.10
"""Of a step's time, added after it in the planted run."""
TELLS = 0.7 * DELAY
"""The floor up to which eight engines a side find the delay in 99 of 100 comparisons."""
SLOWED = ("output_tok_s", "tpot")
"""Figures that the delay must show in; step_us is the step alone, without it."""
ALARMS = (Verdict.FASTER, Verdict.SLOWER)
POINT = ["model=tiny", "workload=decode", "batch=4", "instrument=collectives",
         "workload.output_tokens=64", "engine.threads_per_rank=1"]  # fmt: skip
"""One thread a rank: on a CPU that has other work, a second one waits for its core."""


def slowed(name: str) -> Any:
    """The native backend, whose engine does nothing for a tenth of each step after it. A session's
    child calls this, with the backend's name."""
    from engine.core import EngineCore
    from harness.backends import create

    step = EngineCore.step

    def slow(self: EngineCore) -> Any:
        begin = time.perf_counter()
        finished = step(self)
        until = begin + (time.perf_counter() - begin) * (1 + DELAY)
        while time.perf_counter() < until:
            pass
        return finished

    EngineCore.step = slow  # type: ignore[method-assign]
    return create(name)


def measured(arguments: list[str], results: Path, functions: Functions) -> Path:
    """One run of the harness; -> its folder. SystemExit where it fails."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        status = launcher.run(
            [*arguments, "resume=never", f"results_dir={quoted(str(results))}"],
            conf_folder(),
            lambda configs: run_points(configs, functions),
        )
    if status != 0:
        raise SystemExit(f"the harness ended with status {status}\n{said.getvalue()}")
    return Path(json.loads(said.getvalue().splitlines()[-1])["run"])


def of_delay(planted: cells.Comparison) -> list[Judgement]:
    """Of the figures that the delay must show in."""
    return [cell.judgement for cell in planted.cells if cell.metric in SLOWED]


def can_tell(planted: cells.Comparison) -> bool:
    """Whether engines alike differ by so little that the delay must be found."""
    floors = [judgement.floor for judgement in of_delay(planted)]
    return bool(floors) and all(floor is not None and floor <= TELLS for floor in floors)


def judged(
    alike: list[cells.Comparison], planted: list[cells.Comparison], engines: int
) -> tuple[str, bool]:
    """(markdown, whether all is as it must be)."""
    alarms = sum(any(c.judgement.verdict in ALARMS for c in one.cells) for one in alike)
    counts = {str(v): sum(one.counts()[str(v)] for one in alike) for v in Verdict}
    able = [one for one in planted if can_tell(one)]
    seen = [one for one in able if {j.verdict for j in of_delay(one)} == {Verdict.SLOWER}]
    headings, _ = view(planted[0])
    names = [f"A/A {place + 1}" for place in range(len(alike))]
    names += [f"planted {place + 1}" for place in range(len(planted))]
    both = zip(names, [*alike, *planted], strict=True)
    lines = [[name, *line] for name, one in both for line in view(one)[1]]
    of = planted[0].a
    parts = [
        f"{of['gpu'] or of['cpu']}, torch {of['torch_version']}, commit {of['git_sha']}; {engines} "
        "engines a run.",
        f"{alarms} of {len(alike)} A/A comparisons raised an alarm; their cells: "
        f"{', '.join(f'{n} {v}' for v, n in counts.items())}. A delay of {DELAY:.0%} after each "
        f"step was found in {len(seen)} of {len(able)} comparisons whose floor was at most "
        f"{TELLS:.0%}, of {len(planted)} made.",
        markdown_table(["comparison", *headings], lines),
    ]
    quiet, found = alarms <= len(alike) / 20, 0 < len(able) == len(seen)
    return "\n\n".join(parts), bool(alike) and quiet and found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="A/A comparisons and one planted slow-down.")
    parser.add_argument("--runs", type=count, default=7)
    parser.add_argument("--engines", type=count, default=8)
    parser.add_argument("--tries", type=count, default=1, help="planted comparisons at most")
    parser.add_argument("--minutes", type=positive, default=1e9)
    parser.add_argument("--keep", type=Path, help="keep the runs in this folder")
    parser.add_argument("settings", nargs="*", help="of the harness, for instance model=qwen3-0.6b")
    options = parser.parse_args(argv)
    if options.runs < 2:
        parser.error(f"--runs {options.runs}: an A/A comparison needs 2")
    arguments = [*POINT, f"measure.n_process={options.engines}", "measure.min_repeats=6",
                 "measure.max_repeats=6", *options.settings]  # fmt: skip
    end = time.monotonic() + 60 * options.minutes
    slow = Functions(create=f"{Path(__file__).stem}:slowed")
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch)

        def frame(functions: Functions) -> pd.DataFrame:
            return repeats.read(measured(arguments, folder, functions))

        def in_time() -> bool:
            return time.monotonic() < end

        frames = [frame(Functions())]
        planted = [cells.compare(frames[0], frame(slow))]
        while len(planted) < options.tries and not can_tell(planted[-1]) and in_time():
            planted.append(cells.compare(frame(Functions()), frame(slow)))
        while len(frames) < options.runs and in_time():
            frames.append(frame(Functions()))
        alike = [cells.compare(a, b) for a, b in combinations(frames, 2)]
        text, as_it_must_be = judged(alike, planted, options.engines)
    print(f"`{' '.join(arguments)}`\n\n{text}")
    return int(not as_it_must_be)


if __name__ == "__main__":
    raise SystemExit(main())
