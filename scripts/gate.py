"""Judges this tree's benchmarks against its parent commit's, or against a baseline of this machine.

    python scripts/gate.py [--base REV] [OPTIONS] [-- PYTEST ARGUMENTS]
    python scripts/gate.py --baseline FILE [OPTIONS] [-- PYTEST ARGUMENTS]

Runs tests/benchmarks in fresh processes, by turns here and in a work tree of the base (the parent
commit, or HEAD where files are changed), and judges the ratio of each benchmark. What cannot be
compared is recorded and not judged. Exit status 0: nothing is slower; 1: something is; 2: this
tree's benchmarks failed, or measured nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from harness.console import markdown_table  # noqa: E402
from harness.hardware import gpus  # noqa: E402
from harness.verdict import Judgement, Repeats, Verdict, judge  # noqa: E402

SUITE = "tests/benchmarks"
FASTEST = 5
"""Rounds of a process that count, of which a verdict takes the median: what else runs on the
machine only ever adds time."""
MIN_PROCESSES = 4
"""Of a side; with fewer nothing is said of how processes differ."""
NOT_JUDGED = "recorded, not judged"


class GateError(Exception):
    """Benchmarks that could not be measured."""


@dataclass
class Sample:
    """One benchmark on one side: what it measures, and the fastest rounds (s) of each process."""

    workload: str
    processes: list[list[float]] = field(default_factory=list)

    def repeats(self) -> Repeats:
        return Repeats(tuple(map(tuple, self.processes)), "s")


@dataclass
class Side:
    """What was measured of one tree. `machine`: fingerprint of machine and versions."""

    samples: dict[str, Sample] = field(default_factory=dict)
    machine: str = ""

    def add(self, report: dict[str, Any]) -> None:
        """Adds one process, as pytest-benchmark reported it.

        Raises:
            GateError: it measured nothing.
        """
        if not report["benchmarks"]:
            raise GateError("no benchmark was measured")
        self.machine = report["machine_info"]["fingerprint"]
        for one in report["benchmarks"]:
            sample = self.samples.setdefault(one["fullname"], Sample(one["extra_info"]["workload"]))
            sample.processes.append(sorted(one["stats"]["data"])[:FASTEST])


@dataclass(frozen=True)
class Line:
    """A benchmark's verdict; without a judgement `note` says why there is none."""

    name: str
    note: str = ""
    judgement: Judgement | None = None

    @property
    def slower(self) -> bool:
        return self.judgement is not None and self.judgement.verdict is Verdict.SLOWER

    @property
    def open(self) -> bool:
        """Whether more processes could change what is said."""
        verdict = None if self.judgement is None else self.judgement.verdict
        return verdict in (Verdict.SLOWER, Verdict.AMBIGUOUS)


def judged(base: Side, head: Side, floor: float) -> list[Line]:
    """A line for each benchmark of either side, in the order of the head's."""
    lines = []
    for name, sample in head.samples.items():
        before = base.samples.get(name)
        if before is None:
            lines.append(Line(name, f"{NOT_JUDGED}: the base has no such benchmark"))
        elif before.workload != sample.workload:
            lines.append(Line(name, f"{NOT_JUDGED}: the file that defines it was changed"))
        elif (fewest := min(len(before.processes), len(sample.processes))) < MIN_PROCESSES:
            why = f"{fewest} processes a side, {MIN_PROCESSES} are needed"
            lines.append(Line(name, f"{NOT_JUDGED}: {why}"))
        else:
            lines.append(Line(name, "", judge(before.repeats(), sample.repeats(), "lower", floor)))
    lines += [Line(n, "gone: the base alone has it") for n in base.samples if n not in head.samples]
    return lines


def table(lines: Sequence[Line], head: Side) -> str:
    rows = []
    for line in lines:
        found, sample = line.judgement, head.samples.get(line.name)
        best = min(map(min, sample.processes)) if sample else None
        rows.append(
            [
                line.name.removeprefix(f"{SUITE}/"),
                "-" if best is None else f"{best * 1e6:,.0f}",
                f"{found.ratio:.3f}" if found and found.ratio else "-",
                f"{found.ratio_lo:.3f} to {found.ratio_hi:.3f}"
                if found and found.ratio_lo
                else "-",
                "-" if found is None else str(found.verdict),
                line.note if found is None else found.reason,
            ]
        )
    return markdown_table(["benchmark", "best us", "ratio", "95 %", "verdict", "reason"], rows)


# -- measuring ------------------------------------------------------------------------------------


def measure(tree: Path, timer: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Runs the suite of a tree once in a fresh process; -> pytest-benchmark's report.

    Raises:
        GateError: a benchmark failed, or none was measured.
    """
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        command = [
            sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider",
            "--benchmark-enable", "--benchmark-only", "--benchmark-disable-gc", "--show-capture=no",
            f"--benchmark-timer={timer}", f"--benchmark-json={report}", *arguments,
        ]  # fmt: skip
        # One thread: a second one would wait for a core that other work has.
        environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
        if done.returncode != 0:
            said = "\n".join((done.stdout + done.stderr).splitlines()[-30:])
            raise GateError(f"pytest ended with status {done.returncode} in {tree}\n{said}")
        found: dict[str, Any] = json.loads(report.read_text())
        return found


@dataclass
class Gate:
    """Two trees that are measured by turns.

    Args:
        base, head: the trees; base None: there is nothing to compare with.
        floor: the smallest slow-down that counts, as a fraction.
        seconds: no further turn begins after as long, but to confirm a slow-down.
        arguments: for pytest, on both sides; planted: on the head's alone.
    """

    base: Path | None
    head: Path
    timer: str
    floor: float
    seconds: float
    arguments: Sequence[str] = ()
    planted: Sequence[str] = ()

    def run(self, rounds: int) -> tuple[Side, Side, str]:
        """Up to `rounds` turns of everything, then as many of what is not settled.

        Returns base, head, and what kept the base from being measured.

        Raises:
            GateError: the head failed.
        """
        base, head, obstacle = Side(), Side(), ""
        begin, names = time.monotonic(), [SUITE]
        for stage in range(2):
            for turn in range(rounds):
                late = time.monotonic() - begin > self.seconds
                if late and (stage == 0 and turn or stage == 1 and not self._alarm(base, head)):
                    break
                # A B, B A, ...: a machine that drifts does so for both alike.
                for side in (base, head) if turn % 2 == 0 else (head, base):
                    if side is head:
                        head.add(
                            measure(self.head, self.timer, [*names, *self.arguments, *self.planted])
                        )
                    elif self.base is not None and not obstacle:
                        try:
                            base.add(measure(self.base, self.timer, [*names, *self.arguments]))
                        except GateError as error:
                            obstacle = f"the base's benchmarks failed: {error}"
            names = [line.name for line in judged(base, head, self.floor) if line.open]
            if not names:
                break
        return base, head, obstacle

    def _alarm(self, base: Side, head: Side) -> bool:
        return any(line.slower for line in judged(base, head, self.floor))


# -- what to compare with -------------------------------------------------------------------------


def git(root: Path, *arguments: str) -> str:
    """What git prints; GateError where it fails or is not there."""
    command = ["git", "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    except OSError as error:
        raise GateError(f"git: {error}") from error
    except subprocess.CalledProcessError as error:
        raise GateError(f"git {' '.join(arguments)}: {error.stderr.strip()}") from error
    return done.stdout.strip()


@contextmanager
def work_tree(root: Path, base: str | None) -> Iterator[tuple[Path | None, str]]:
    """(A work tree of the base, its commit), or (None, why there is none)."""
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch) / "base"
        try:
            if base is None:
                changed = git(root, "status", "--porcelain", "--untracked-files=no")
                base = "HEAD" if changed else "HEAD^"
            try:
                commit = git(root, "rev-parse", "--verify", f"{base}^{{commit}}")
            except GateError:
                shallow = "fetch two commits for a shallow clone, none is needed for a first commit"
                raise GateError(f"no commit {base} here ({shallow})") from None
            git(root, "worktree", "add", "--detach", "--quiet", str(tree), commit)
        except GateError as error:
            yield None, str(error)
            return
        try:
            if (tree / SUITE).is_dir():
                yield tree, commit
            else:
                yield None, f"{base} ({commit[:10]}) has no {SUITE}"
        finally:
            git(root, "worktree", "remove", "--force", str(tree))
