"""Shows what scripts/gate.py is worth on this machine: unchanged code, and planted slow-downs.

    python scripts/gate_check.py [--runs 20] [--processes 5] [--factor 1.3] [-- PYTEST ARGUMENTS]

Judges two work trees of HEAD against one another --runs times: each SLOWER is a false alarm. Then
twice with every other benchmark slowed down by waiting behind each round: those must be SLOWER, and
the others not. Prints markdown, of what there is if it is interrupted; exit status 0 if all was run
and is as it must be.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gate import ROOT, Gate, default_timer

from harness.judging.commits import git, work_tree
from harness.judging.gate import FLOOR, Line
from harness.judging.verdict import Verdict
from harness.machine import hardware
from harness.tables.console import markdown_table


@dataclass(frozen=True)
class Run:
    """One judgement of all benchmarks, of which `planted` (names with their files) were slowed."""

    lines: Sequence[Line]
    planted: frozenset[str] = frozenset()
    seconds: float = 0.0


def wrong(run: Run) -> list[str]:
    """Benchmarks that were slowed and are not SLOWER, or are it and were not; with the verdict."""
    return [
        f"{line.bare} {line.verdict}"
        for line in run.lines
        if line.slower != (line.name in run.planted)
    ]


def summary(runs: Sequence[Run]) -> str:
    """A row a benchmark: what unchanged code gave, and what the slow-down gave."""
    rows = []
    for name in dict.fromkeys(line.name for run in runs for line in run.lines):
        found = [(run, line) for run in runs for line in run.lines if line.name == name]
        alike = [line for run, line in found if name not in run.planted]
        slowed = [line for run, line in found if name in run.planted]
        counts = Counter(str(line.verdict) for line in alike)
        rows.append(
            [
                alike[0].bare if alike else slowed[0].bare,
                ", ".join(f"{counts[v]} {v}" for v in sorted(counts)) or "-",
                _ratios(alike),
                ", ".join(str(line.verdict) for line in slowed) or "-",
                _ratios(slowed),
            ]
        )
    headings = ["benchmark", "unchanged", "ratios", "slowed", "ratios"]
    return markdown_table(headings, rows)


def _ratios(lines: Sequence[Line]) -> str:
    found = [line.judgement.ratio for line in lines if line.judgement and line.judgement.ratio]
    if not found:
        return "-"
    lo, hi = min(found), max(found)
    return f"{lo:.3f}" if len(found) == 1 else f"{lo:.3f} to {hi:.3f}"


def report(runs: Sequence[Run], factor: float) -> str:
    alike = [run for run in runs if not run.planted]
    slowed = [(run, line) for run in runs for line in run.lines if line.name in run.planted]
    alarms = sum(any(line.slower for line in run.lines) for run in alike)
    strangers = sum(
        line.slower for run in runs for line in run.lines if line.name not in run.planted
    )
    missed = sum(line.verdict is not Verdict.SLOWER for _, line in slowed)
    mean = sum(run.seconds for run in runs) / len(runs)
    return (
        f"{alarms} of {len(alike)} judgements of unchanged code raised an alarm. A slow-down by "
        f"{factor} was found in {len(slowed) - missed} of {len(slowed)} benchmarks that had one; "
        f"{strangers} others were called slower. {mean:.0f} s a judgement.\n\n{summary(runs)}"
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="What the gate is worth on this machine.")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--factor", type=float, default=1.3)
    parser.add_argument("--floor", type=float, default=FLOOR)
    parser.add_argument("arguments", nargs="*", help="for pytest, after --")
    options = parser.parse_args(argv)
    commit, timer, runs = git(ROOT, "rev-parse", "HEAD"), default_timer(), list[Run]()

    def judge(trees: Sequence[Path], planted: Sequence[str] = ()) -> None:
        begin = time.monotonic()
        words = [f"--plant={name.rpartition('::')[2]}={options.factor}" for name in planted]
        gate = Gate(trees[1], trees[0], timer, options.floor, arguments=options.arguments,
                    planted=words)  # fmt: skip
        gate.run(options.processes)
        runs.append(Run(gate.lines(), frozenset(planted), time.monotonic() - begin))
        said = f"WRONG: {', '.join(found)}" if (found := wrong(runs[-1])) else "as it must be"
        print(f"{len(runs)}: {said}, {runs[-1].seconds:.0f} s", file=sys.stderr, flush=True)

    whole = False
    with ExitStack() as stack, suppress(KeyboardInterrupt):
        trees = [stack.enter_context(work_tree(ROOT, commit)) for _ in range(2)]
        for _ in range(options.runs):
            judge(trees)
        names = [line.name for line in runs[0].lines]
        for half in (names[::2], names[1::2]):
            judge(trees, half)
        whole = True
    if not runs:
        return 1
    found = hardware.capture()
    machine = found["gpus"][0]["name"] if found["gpus"] else found["cpu"]
    print(
        f"{machine}, {found['cpu_cores']} cores, torch {found['versions']['torch']}, commit "
        f"{commit}; {options.processes} processes a side, timer {timer}, floor "
        f"{options.floor:.0%}.\n\n{report(runs, options.factor)}"
    )
    return int(not whole or any(map(wrong, runs)))


if __name__ == "__main__":
    raise SystemExit(main())
