"""Benchmarks of two commits, as pytest-benchmark reported them, judged one by one."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from harness.judging.variance import t_quantile
from harness.judging.verdict import BAND, CLAIM, Judgement, Repeats, Verdict, judge
from harness.tables.console import markdown_table
from harness.tables.marker import write_json

FASTEST = 5
"""Rounds of a process that count where no pairs can be made, of which a verdict takes the median:
what else runs on the machine only ever adds time."""
MIN_PROCESSES = 4
"""Of a side; fewer say too little of how far processes differ."""
FLOOR = 0.15
"""The smallest slow-down that counts, half way from 1 to 1.3 on a logarithmic scale."""
NOT_JUDGED = "recorded, not judged"


class GateError(Exception):
    """Benchmarks that could not be measured, or have nothing to be compared with."""


@dataclass
class Sample:
    """One benchmark on one side: a hash of the file that defines it, and the rounds of each process
    in seconds, as they followed one another."""

    workload: str
    processes: list[list[float]] = field(default_factory=list)

    @property
    def best_s(self) -> float:
        return min(map(min, self.processes))


@dataclass
class Side:
    """What was measured of one commit, a Sample by the benchmark's name."""

    samples: dict[str, Sample] = field(default_factory=dict)

    def add(self, report: dict[str, Any]) -> None:
        """Adds one process's report (pytest-benchmark's JSON).

        Raises:
            GateError: it measured nothing.
        """
        if not report["benchmarks"]:
            raise GateError("no benchmark was measured")
        for one in report["benchmarks"]:
            new = Sample(one["extra_info"]["workload"])
            sample = self.samples.setdefault(one["fullname"], new)
            sample.processes.append(one["stats"]["data"])


@dataclass(frozen=True)
class Line:
    """What is said of a benchmark; without a judgement `note` says why there is none."""

    name: str
    note: str = ""
    judgement: Judgement | None = None

    @property
    def bare(self) -> str:
        """The name without its file."""
        return self.name.rpartition("::")[2]

    @property
    def verdict(self) -> Verdict | None:
        return None if self.judgement is None else self.judgement.verdict

    @property
    def slower(self) -> bool:
        return self.verdict is Verdict.SLOWER

    @property
    def settled(self) -> bool:
        """Whether more processes are not needed; an alarm must stand with twice as many."""
        return self.verdict not in (Verdict.SLOWER, Verdict.AMBIGUOUS)


def judged(base: Side, head: Side, floor: float = FLOOR, paired: bool = True) -> list[Line]:
    """A line for each benchmark of the head, then for those that the base alone has.

    Args:
        paired: the n-th processes of both sides ran at the same time and took turns round by round,
            so that what disturbed one disturbed the other. Else both sides are judged as
            `verdict.judge` does with fresh engines.
    """
    lines = []
    for name, sample in head.samples.items():
        before = base.samples.get(name)
        note = _obstacle(before, sample)
        if note or before is None:
            lines.append(Line(name, f"{NOT_JUDGED}: {note}"))
        elif paired:
            lines.append(Line(name, "", judge_pairs(before, sample, floor)))
        else:
            found = judge(_repeats(before), _repeats(sample), "lower", floor)
            lines.append(Line(name, "", found))
    gone = [name for name in base.samples if name not in head.samples]
    return lines + [Line(name, "gone: the base alone has it") for name in gone]


def judge_pairs(base: Sample, head: Sample, floor: float) -> Judgement:
    """The rule of `verdict.judge` for pairs: each pair of processes gives one ratio, the median
    over rounds that followed one another; Student's t over their logarithms gives its intervals.

    FASTER, SLOWER: the 99 % interval leaves out 1, and the ratio is beyond the floor. SAME: the
    95 % interval lies within the floor. Else AMBIGUOUS.
    """
    logs = np.array(
        [
            np.median([math.log(after / before) for before, after in zip(*pair, strict=False)])
            for pair in zip(base.processes, head.processes, strict=False)
        ]
    )
    mean, error = float(logs.mean()), float(logs.std(ddof=1)) / math.sqrt(len(logs))
    claim, band = (t_quantile(level, len(logs) - 1) * error for level in (CLAIM, BAND))
    ratio, lo, hi = (math.exp(mean + by) for by in (0.0, -band, band))
    effect, limit = math.expm1(abs(mean)), f"the floor of {floor:.0%}"
    if abs(mean) > claim and effect > floor:
        verdict = Verdict.SLOWER if mean > 0 else Verdict.FASTER
        reason = f"99 % interval of the ratio without 1, and a factor beyond {limit}"
    elif max(hi, 1 / lo) - 1 < floor:
        verdict, reason = Verdict.SAME, f"95 % interval of the ratio within {limit}"
    else:
        verdict = Verdict.AMBIGUOUS
        reason = f"the ratio's interval leaves {limit}, and {len(logs)} pairs do not tell more"
    return Judgement(verdict, reason, ratio, lo, hi, floor)


def kept(base: Side, head: Side, lines: Iterable[Line]) -> Side:
    """The baseline behind a comparison: what was compared stays, and so does what this run had too
    few processes of or did not measure; what it knows first, or after a change, is the head's."""
    compared = {line.name for line in lines if line.judgement is not None}
    found = dict(head.samples)
    for name, sample in base.samples.items():
        new = head.samples.get(name)
        fewer = new is None or (
            new.workload == sample.workload and len(new.processes) <= len(sample.processes)
        )
        if name in compared or fewer:
            found[name] = sample
    return Side(found)


def _obstacle(before: Sample | None, sample: Sample) -> str:
    if before is None:
        return "the base has no such benchmark"
    if before.workload != sample.workload:
        return "the file that defines it was changed"
    fewest = min(len(before.processes), len(sample.processes))
    if fewest < MIN_PROCESSES:
        return f"{fewest} processes on a side, {MIN_PROCESSES} are needed"
    return ""


def _repeats(sample: Sample) -> Repeats:
    return Repeats(tuple(tuple(sorted(rounds)[:FASTEST]) for rounds in sample.processes), "s")


def table(lines: Iterable[Line], head: Side) -> str:
    """Markdown: a row a benchmark."""
    rows: list[Sequence[str]] = []
    for line in lines:
        sample, found = head.samples.get(line.name), line.judgement
        ratio = interval = "-"
        if found is not None and found.ratio is not None:
            ratio = f"{found.ratio:.3f}"
        if found is not None and found.ratio_lo is not None:
            interval = f"{found.ratio_lo:.3f} to {found.ratio_hi:.3f}"
        best = "-" if sample is None else f"{sample.best_s * 1e6:,.0f}"
        why = line.note if found is None else found.reason
        rows.append([line.bare, best, ratio, interval, str(line.verdict or "-"), why])
    return markdown_table(["benchmark", "best us", "ratio", "95 %", "verdict", "reason"], rows)


# -- a baseline in a file -------------------------------------------------------------------------


def machine_key() -> str:
    """What two results must have in common to be compared: the machine's fingerprint (CPU, cores,
    memory, GPUs and driver, operating system) and the versions of Python, torch and numpy."""
    from harness.machine.fingerprint import digest
    from harness.machine.hardware import capture

    found = capture()
    versions = {name: found["versions"][name] for name in ("python", "torch", "numpy")}
    return digest([found["fingerprint"], versions])


def read_baseline(path: Path, machine: str) -> Side | None:
    """What the file holds of this machine; None if nothing, or if there is no file.

    Raises:
        GateError: a file that cannot be read, or that no baseline was written to.
    """
    entry = _entries(path).get(machine)
    if entry is None:
        return None
    try:
        side = Side({name: Sample(**sample) for name, sample in entry["benchmarks"].items()})
        rounds = [one for sample in side.samples.values() for one in sample.processes]
        whole = all(sample.processes for sample in side.samples.values())
        if not whole or not all(rounds) or not all(0 < s < math.inf for r in rounds for s in r):
            raise ValueError("a benchmark without rounds, or a round that took no time")
        return side
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise GateError(f"{path} is no baseline ({error!r}): give another file") from error


def _entries(path: Path) -> dict[str, Any]:
    """The file's entries by machine."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise GateError(f"{path} cannot be read ({error.strerror}): give another file") from error
    except (ValueError, RecursionError) as error:
        raise GateError(f"{path} is no baseline ({error}): give another file") from error
    if not isinstance(entries, dict):
        raise GateError(f"{path} is no baseline (no object of machines): give another file")
    return entries


def write_baseline(path: Path, machine: str, side: Side, commit: str | None) -> None:
    """Puts what was measured in the place of this machine's entry; those of others stay, and all of
    them where this ends half way.

    Raises:
        GateError: the file cannot be read or written.
    """
    samples = {name: asdict(sample) for name, sample in side.samples.items()}
    entries = _entries(path) | {machine: {"commit": commit, "benchmarks": samples}}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, dict(sorted(entries.items())))
    except OSError as error:
        raise GateError(
            f"{path} cannot be written ({error.strerror}): give another file"
        ) from error
