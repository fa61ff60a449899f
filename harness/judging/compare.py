"""`python -m harness compare A B`: cells of two runs judged, with an exit status for CI."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from harness.judging.cells import DEFAULT, Comparison, Refused, compare
from harness.judging.repeats import read
from harness.judging.verdict import Verdict
from harness.settings.config import as_written
from harness.settings.usage import COMPARE
from harness.store import StoreError
from harness.tables.console import markdown_table, print_line, print_table, stdout
from harness.tables.plain import jsonable

if TYPE_CHECKING:
    import pandas as pd

RIGHT = ("A", "B", "B / A", "95 %\ninterval", "floor\n%", "engines\nA, B", "repeats\nA, B")


def main(arguments: Sequence[str]) -> int:
    """Judges B against A and prints it.

    Returns 0 where nothing is SLOWER (nor, with --fail-on ambiguous, AMBIGUOUS), 1 where something
    is, 2 where the command line is wrong or the two cannot be compared.
    """
    try:
        options = _parser().parse_args(list(arguments))
    except SystemExit:
        return 2
    try:
        found = compare(
            read(options.a),
            read(options.b),
            options.metrics,
            across_machines=options.across_machines,
            floor=options.floor,
        )
    except (Refused, StoreError) as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    if options.form is None:
        _print(found)
    else:
        print({"markdown": markdown, "csv": csv, "json": to_json}[options.form](found).rstrip("\n"))
    counts = found.counts()
    failing = ("SLOWER", "AMBIGUOUS") if options.fail_on == "ambiguous" else ("SLOWER",)
    return int(any(counts[name] for name in failing))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="compare", usage=COMPARE, add_help=False, allow_abbrev=False
    )
    parser.add_argument("a")
    parser.add_argument("b")
    parser.add_argument("--metrics", type=lambda text: text.split(","), default=list(DEFAULT))
    parser.add_argument("--floor", type=fraction)
    parser.add_argument("--across-machines", action="store_true")
    parser.add_argument("--fail-on", choices=("slower", "ambiguous"), default="slower")
    forms = parser.add_mutually_exclusive_group()
    for form in ("markdown", "csv", "json"):
        forms.add_argument(f"--{form}", dest="form", action="store_const", const=form)
    return parser


def fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text}: give a fraction between 0 and 1, such as 0.03")
    return value


def frame(found: Comparison) -> pd.DataFrame:
    """A row a cell and metric, with the settings that vary, both centres with their 99 % intervals,
    the ratio B / A with its 95 % interval, the floor, the verdict and its reason."""
    import pandas as pd

    return pd.DataFrame([cell.row(found.shown) for cell in found.cells])


def csv(found: Comparison) -> str:
    """The frame; a missing number is an empty field."""
    return str(frame(found).to_csv(index=False))


def to_json(found: Comparison) -> str:
    """Both sides, the cells, what is on one side alone and the counts; no NaN."""
    whole = {
        "a": found.a,
        "b": found.b,
        "cells": [cell.row(list(cell.settings)) for cell in found.cells],
        "only_a": found.only_a,
        "only_b": found.only_b,
        "notes": found.notes,
        "counts": found.counts(),
    }
    return json.dumps(jsonable(whole), indent=1, allow_nan=False)


def markdown(found: Comparison) -> str:
    """The printed table and the lines round it."""
    return "\n\n".join([*_head(found), markdown_table(*view(found)), *_remarks(found)])


def _print(found: Comparison) -> None:
    console = stdout()
    for line in _head(found):
        print_line(console, line)
    headings, rows = view(found)
    print_table(console, headings, rows, wrapped="reason", right=RIGHT)
    for line in _remarks(found):
        print_line(console, line)


def view(found: Comparison) -> tuple[list[str], list[list[str]]]:
    """(headings, rows of text): `-` is a missing number."""
    axes = ["eager" if name == "enforce_eager" else name for name in found.shown]
    headings = ["verdict", *axes, "metric", *RIGHT, "reason"]
    rows = []
    for cell in found.cells:
        judged = cell.judgement
        unit, factor = _unit(cell.row(())["unit"])
        sides = (judged.a, judged.b)
        rows.append(
            [
                str(judged.verdict),
                *(as_written(cell.settings.get(name)) for name in found.shown),
                f"{cell.metric} {unit}".rstrip(),
                *("-" if side is None else _number(side.value * factor) for side in sides),
                "-" if judged.ratio is None else f"{judged.ratio:.3f}",
                _interval(judged.ratio_lo, judged.ratio_hi),
                "-" if judged.floor is None else f"{judged.floor * 100:.1f}",
                ", ".join("-" if side is None else str(side.n_process) for side in sides),
                ", ".join("-" if side is None else str(side.n) for side in sides),
                judged.reason,
            ]
        )
    return headings, rows


def _unit(unit: str) -> tuple[str, float]:
    """How a figure is printed: seconds of these figures are milliseconds."""
    return ("ms", 1e3) if unit == "s" else ({"1": ""}.get(unit, unit), 1.0)


def _number(value: float) -> str:
    """Four digits at least."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _interval(lo: float | None, hi: float | None) -> str:
    return "-" if lo is None or hi is None else f"{lo:.3f} to {hi:.3f}"


def _head(found: Comparison) -> list[str]:
    """What A and B are."""

    def line(name: str, side: dict[str, Any]) -> str:
        said = [str(side["run_id"]), str(side["gpu"] or side["cpu"])]
        if side["git_sha"]:
            said.append(f"commit {str(side['git_sha'])[:7]}")
        if side["torch_version"]:
            said.append(f"torch {side['torch_version']}")
        return f"{name}: {', '.join(said)}"

    return [line("A", found.a), line("B", found.b)]


def _remarks(found: Comparison) -> list[str]:
    """What stands below the table: notes, cells of one side, the count."""
    lines = list(found.notes)
    for name, cells in (("A", found.only_a), ("B", found.only_b)):
        lines += [f"only in {name}: {cell}" for cell in cells]
    counts = found.counts()
    order = (Verdict.SLOWER, Verdict.FASTER, Verdict.SAME, Verdict.AMBIGUOUS)
    return [*lines, ", ".join(f"{counts[str(verdict)]} {verdict}" for verdict in order)]
