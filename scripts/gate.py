"""Judges this tree's benchmarks against its parent commit's, or against a baseline of this machine.

    python scripts/gate.py [--base REV] [OPTIONS] [-- PYTEST ARGUMENTS]
    python scripts/gate.py --baseline FILE [--record] [OPTIONS] [-- PYTEST ARGUMENTS]

Runs tests/benchmarks in fresh processes, by turns here and in a work tree of the base (the parent
commit; HEAD where files are changed), and judges the ratio of each benchmark. What has nothing to
be compared with is recorded and not judged. Exit status 0: nothing is slower; 1: something is; 2:
this tree's benchmarks failed, or none was measured.
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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from harness import gate, hardware  # noqa: E402
from harness.gate import NOT_JUDGED, GateError, Side  # noqa: E402

SUITE = "tests/benchmarks"


def default_timer() -> str:
    """CPU time of the process, which others on the machine do not add to; with a GPU, whose work is
    no CPU time, the wall clock."""
    return "time.perf_counter" if hardware.gpus() else "time.process_time"


def measure(tree: Path, timer: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Runs benchmarks of a tree in a fresh process; -> pytest-benchmark's report.

    Raises:
        GateError: one failed, or none was measured.
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
    """Benchmarks of two trees, measured by turns.

    Args:
        tree: the head's; base_tree: None where there is none, or the base is a file's.
        seconds: no further turn begins after as long, but to confirm a slow-down.
        arguments: for pytest, on both sides; planted: on the head's alone.

    Attributes:
        base, head: what was measured.
        obstacle: why the base could not be measured.
    """

    tree: Path
    base_tree: Path | None
    timer: str
    floor: float = gate.FLOOR
    seconds: float = 1e9
    arguments: Sequence[str] = ()
    planted: Sequence[str] = ()
    base: Side = field(default_factory=Side)
    head: Side = field(default_factory=Side)
    obstacle: str = ""

    def run(self, rounds: int) -> None:
        """`rounds` turns of everything, then as many of what is not settled.

        Raises:
            GateError: the head failed.
        """
        begin = time.monotonic()
        names = [SUITE]
        for again in (False, True):
            for turn in range(rounds):
                late = time.monotonic() - begin > self.seconds
                if (late and turn and not again) or (late and again and not self.alarm):
                    break
                if self.obstacle and turn:  # nothing to be compared with
                    break
                self._turn(names, turn)
            names = [line.name for line in self.lines() if not line.settled]
            if not names:
                return

    def _turn(self, names: Sequence[str], turn: int) -> None:
        """A B, B A, A B, ..: a machine that drifts does so for both alike."""
        sides = [self._measure_base, self._measure_head]
        for side in sides if turn % 2 == 0 else reversed(sides):
            side([*names, *self.arguments])

    def _measure_head(self, arguments: list[str]) -> None:
        self.head.add(measure(self.tree, self.timer, [*arguments, *self.planted]))

    def _measure_base(self, arguments: list[str]) -> None:
        if self.base_tree is None or self.obstacle:
            return
        try:
            self.base.add(measure(self.base_tree, self.timer, arguments))
        except GateError as error:
            self.obstacle = f"the base's benchmarks failed: {error}"

    def lines(self) -> list[gate.Line]:
        return gate.judged(self.base, self.head, self.floor)

    @property
    def alarm(self) -> bool:
        return any(line.slower for line in self.lines())


# -- what to compare with -------------------------------------------------------------------------


def git(root: Path, *arguments: str) -> str:
    """What git prints.

    Raises:
        GateError: it fails, or is not there.
    """
    command = ["git", "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except OSError as error:
        raise GateError(f"git: {error}") from error
    except subprocess.CalledProcessError as error:
        raise GateError(f"git {arguments[0]}: {error.stderr.strip()}") from error
    return done.stdout.strip()


def find_base(root: Path, asked: str | None) -> str:
    """The commit to compare with: the one asked for, else HEAD where tracked files are changed,
    else HEAD's first parent.

    Raises:
        GateError: there is none.
    """
    if Path(git(root, "rev-parse", "--show-toplevel")).resolve() != root.resolve():
        raise GateError("this tree is no git work tree of its own")
    if asked is None:
        asked = "HEAD" if git(root, "status", "--porcelain", "-uno") else "HEAD^"
    try:
        return git(root, "rev-parse", "--verify", "--quiet", f"{asked}^{{commit}}")
    except GateError:
        why = "a first commit, or a shallow clone: fetch one commit more"
        raise GateError(f"{asked} is not here ({why})") from None


@contextmanager
def work_tree(root: Path, commit: str) -> Iterator[Path]:
    """A work tree of the commit, removed at the end.

    Raises:
        GateError: git cannot make one.
    """
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch) / commit[:10]
        git(root, "worktree", "add", "--detach", "--quiet", str(tree), commit)
        try:
            yield tree
        finally:
            git(root, "worktree", "remove", "--force", str(tree))


# -- the command ----------------------------------------------------------------------------------


def against_parent(options: argparse.Namespace) -> Gate:
    found = Gate(
        ROOT, None, options.timer or default_timer(), options.floor, options.seconds,
        options.arguments,
    )  # fmt: skip
    with ExitStack() as stack:
        try:
            commit = find_base(ROOT, options.base)
            tree = stack.enter_context(work_tree(ROOT, commit))
            if not (tree / SUITE).is_dir():
                raise GateError(f"the base {commit[:10]} has no {SUITE}")
            found.base_tree = tree
        except GateError as error:
            found.obstacle = str(error)
        found.run(options.rounds)
    return found


def against_baseline(options: argparse.Namespace) -> Gate:
    path, machine = options.baseline, gate.machine_key()
    known = None if options.record else gate.read_baseline(path, machine)
    found = Gate(
        ROOT, None, options.timer or default_timer(), options.floor, options.seconds,
        options.arguments, base=known or Side(),
    )  # fmt: skip
    found.run(options.rounds)
    if known is None:
        found.obstacle = f"{path} had nothing of this machine ({machine})"
    kept = {line.name: found.base.samples[line.name] for line in found.lines() if line.judgement}
    gate.write_baseline(path, machine, Side({**found.head.samples, **kept}), hardware.git()["sha"])
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Judges this tree's benchmarks against its base.")
    parser.add_argument("--base", metavar="REV", help="compare with this commit")
    parser.add_argument("--baseline", type=Path, metavar="FILE", help="compare with a file instead")
    parser.add_argument("--record", action="store_true", help="with --baseline: replace it")
    parser.add_argument("--rounds", type=int, default=5, help="processes a side")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no turn after as long")
    parser.add_argument("--floor", type=float, default=gate.FLOOR, help="slow-down that counts")
    parser.add_argument("--timer", help="time.process_time or time.perf_counter")
    parser.add_argument("arguments", nargs="*", help="for pytest, after --")
    options = parser.parse_args(argv)
    try:
        found = against_baseline(options) if options.baseline else against_parent(options)
    except GateError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(gate.table(found.lines(), found.head))
    if found.obstacle:
        print(f"\n{NOT_JUDGED}: {found.obstacle}")
    return int(found.alarm)


if __name__ == "__main__":
    raise SystemExit(main())
