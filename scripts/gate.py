"""Judges this tree's benchmarks against its parent commit's, or against a baseline of this machine.

    python scripts/gate.py [--base REV] [OPTIONS] [-- PYTEST ARGUMENTS]
    python scripts/gate.py --baseline FILE [--record] [OPTIONS] [-- PYTEST ARGUMENTS]

Runs tests/benchmarks in fresh processes, two at a time that take turns round by round: one here,
one in a work tree of the base (the parent commit; HEAD where files are changed). Judges the ratio
of each benchmark; what has nothing to be compared with is recorded and not judged. Exit status 0:
nothing is slower; 1: something is; 2: this tree's benchmarks failed, none was measured, or REV is
not here.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from harness.judging import gate  # noqa: E402
from harness.judging.commits import accepted, find_base, work_tree  # noqa: E402
from harness.judging.gate import NOT_JUDGED, GateError, Side  # noqa: E402
from harness.machine import hardware  # noqa: E402
from harness.settings.arguments import count, positive  # noqa: E402
from tests.support.turns import take_turns  # noqa: E402

SUITE = "tests/benchmarks"


def default_timer() -> str:
    """CPU time of the process, which others on the machine do not add to; with a GPU, whose work is
    no CPU time, the wall clock."""
    return "time.perf_counter" if hardware.gpus() else "time.process_time"


def share_core(pids: Sequence[int], pair: int) -> None:
    """Puts all threads of the processes on one core, which the pair's number chooses: those of two
    cores may have unlike neighbours (docs/benchmarks.md). Nothing where there is no such call."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    for pid in pids if cores else ():
        with suppress(ProcessLookupError, FileNotFoundError):  # it has ended
            for thread in os.listdir(f"/proc/{pid}/task"):
                os.sched_setaffinity(int(thread), {cores[pair % len(cores)]})


def measure(
    trees: Sequence[Path], timer: str, arguments: Sequence[Sequence[str]], pair: int = 0
) -> list[dict[str, Any] | GateError]:
    """Runs benchmarks of one or two trees, each in a fresh process with its pytest arguments, two
    by turns on one core; -> pytest-benchmark's report of each, or why there is none."""
    # One thread: a second one would wait for a core that other work has.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    running: list[tuple[subprocess.Popen[bytes], Path, Path]] = []
    ends = []
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        for place, (tree, own) in enumerate(zip(trees, arguments, strict=True)):
            report, said = (Path(scratch) / f"{place}.{name}" for name in ("json", "txt"))
            command = [
                sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider",
                "-p", "no:hypothesispytest",  # a second less to start
                "--benchmark-enable", "--benchmark-only", "--benchmark-disable-gc",
                "--show-capture=no", f"--benchmark-timer={timer}", f"--benchmark-json={report}",
                *own,
            ]  # fmt: skip
            passed: list[int] = []
            if len(trees) == 2:
                here, there = socket.socketpair()
                ends.append(here)
                passed.append(there.fileno())
                command.append(f"--turns={there.fileno()}")
            with said.open("wb") as file:
                process = subprocess.Popen(
                    command, cwd=tree, env=environment | {"PYTHONPATH": str(tree)}, stdout=file,
                    stderr=subprocess.STDOUT, pass_fds=passed,
                )  # fmt: skip
            stack.callback(_end, process)
            if passed:
                there.close()
            running.append((process, report, said))
        if ends:
            take_turns(ends, partial(share_core, [process.pid for process, _, _ in running], pair))
        found: list[dict[str, Any] | GateError] = []
        for (process, report, said), tree in zip(running, trees, strict=True):
            if process.wait() == 0 and report.is_file():
                found.append(json.loads(report.read_text()))
            else:
                lines = said.read_text(errors="replace").splitlines()[-30:]
                why = f"pytest ended with status {process.returncode} in {tree}"
                found.append(GateError("\n".join([why, *lines])))
        return found


@dataclass
class Gate:
    """Benchmarks of two trees, measured by turns.

    Args:
        tree: the head's; base_tree: None where there is none, or the base is a file's.
        seconds: no process begins after as long, but the first, and those that confirm an alarm.
        arguments: for pytest, on both sides; planted: on the head's alone.
        accepted: benchmarks that may be slower.

    Attributes:
        base, head: what was measured.
        obstacle: why there is no base.
    """

    tree: Path
    base_tree: Path | None
    timer: str
    floor: float = gate.FLOOR
    seconds: float = 1e9
    arguments: Sequence[str] = ()
    planted: Sequence[str] = ()
    accepted: frozenset[str] = frozenset()
    base: Side = field(default_factory=Side)
    head: Side = field(default_factory=Side)
    obstacle: str = ""
    _pairs: int = 0

    def run(self, processes: int) -> None:
        """As many processes a side, then as many again of what is not settled.

        Raises:
            GateError: the head failed.
        """
        begin = time.monotonic()
        names = [SUITE]
        for again in (False, True):
            for n in range(processes):
                late = time.monotonic() - begin > self.seconds
                if late and (not self.alarm if again else n):
                    break
                self._measure([*names, *self.arguments])
                if self.obstacle:  # nothing to be compared with
                    return
            names = [line.name for line in self.lines() if not line.settled]
            if not names:
                return

    def _measure(self, arguments: list[str]) -> None:
        own = [*arguments, *self.planted]
        if self.base_tree is None:
            found = measure([self.tree], self.timer, [own])
        else:
            both = [self.base_tree, self.tree]
            found = measure(both, self.timer, [arguments, own], self._pairs)
            self._pairs += 1
        *before, head = found
        if isinstance(head, GateError):
            raise head
        self.head.add(head)
        for base in before:
            if isinstance(base, GateError):
                self.obstacle = f"the base's benchmarks failed: {base}"
            else:
                self.base.add(base)

    def lines(self) -> list[gate.Line]:
        return gate.judged(self.base, self.head, self.floor, paired=self.base_tree is not None)

    @property
    def alarm(self) -> bool:
        return any(line.slower for line in self.lines() if line.bare not in self.accepted)


def against_parent(options: argparse.Namespace) -> Gate:
    found = Gate(
        ROOT, None, options.timer or default_timer(), options.floor, options.seconds,
        options.arguments,
    )  # fmt: skip
    if options.base is not None:
        find_base(ROOT, options.base)  # raises: not judged, a wrong name would let all pass
    with ExitStack() as stack:
        try:
            commit = find_base(ROOT, options.base)
            found.accepted = accepted(ROOT)
            tree = stack.enter_context(work_tree(ROOT, commit))
            if not (tree / SUITE).is_dir():
                raise GateError(f"the base {commit[:10]} has no {SUITE}")
            found.base_tree = tree
        except GateError as error:
            found.obstacle = str(error)
        found.run(options.processes)  # without a base it ends after one process
    return found


def against_baseline(options: argparse.Namespace) -> Gate:
    path, machine = options.baseline, gate.machine_key()
    known = gate.read_baseline(path, machine)  # with --record too: it raises before hours of work
    why = f"{path} had nothing of this machine ({machine})"
    if options.record and known is not None:
        known, why = None, f"--record replaced what {path} had of this machine ({machine})"
    found = Gate(
        ROOT, None, options.timer or default_timer(), options.floor, options.seconds,
        options.arguments, base=known or Side(),
    )  # fmt: skip
    found.run(options.processes)
    if known is None:
        found.obstacle = why
    side = gate.kept(found.base, found.head, found.lines())
    gate.write_baseline(path, machine, side, hardware.git()["sha"])
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Judges this tree's benchmarks against its base.")
    bases = parser.add_mutually_exclusive_group()
    bases.add_argument("--base", metavar="REV", help="compare with this commit")
    bases.add_argument("--baseline", type=Path, metavar="FILE", help="compare with a file instead")
    parser.add_argument("--record", action="store_true", help="with --baseline: replace it")
    parser.add_argument("--processes", type=count, default=5, help="of each side")
    parser.add_argument(
        "--seconds", type=positive, default=1e9, help="start no process later but for an alarm"
    )
    parser.add_argument("--floor", type=positive, default=gate.FLOOR, help="slow-down that counts")
    parser.add_argument("--timer", help="time.process_time or time.perf_counter")
    parser.add_argument("arguments", nargs="*", help="for pytest, after --")
    options = parser.parse_args(argv)
    if options.record and not options.baseline:
        parser.error("--record: of which file? give --baseline FILE")
    try:
        found = against_baseline(options) if options.baseline else against_parent(options)
    except GateError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(gate.table(found.lines(), found.head))
    for name in sorted(found.accepted):
        print(f"\n{name} may be slower, as the commit's message says")
    if found.obstacle:
        print(f"\n{NOT_JUDGED}: {found.obstacle}")
    return int(found.alarm)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Of one callback: a Ctrl-C between two would wait for a process that nobody has killed."""
    process.kill()  # one that has ended is left alone
    process.wait()


def end_in_order() -> None:
    """A SIGTERM, as of a CI job that is cancelled, ends what runs and takes the work tree out of
    the repository, as Ctrl-C does."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


if __name__ == "__main__":
    end_in_order()
    raise SystemExit(main())
