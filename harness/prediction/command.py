"""`python -m harness predict RUN ...`: step times of cells that the runs do not hold."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from harness.calibration.curves import Curves
from harness.calibration.file import Calibration, path_of
from harness.machine.models import PUBLISHED
from harness.measuring.roofline import Ceilings
from harness.prediction.cells import measured, shape_of
from harness.prediction.model import PredictionError
from harness.prediction.predict import Fitted, fitted, notes, rows
from harness.settings.arguments import numbers
from harness.store import NoRunError, StoreError
from harness.tables.console import markdown_table, print_line, print_table, stdout

NOTHING = (
    "every cell asked for is measured, so nothing is predicted; say what the runs do not hold by "
    "--tp, --batch or --model, as in --tp 8"
)
Table = tuple[str, list[str], list[list[str]]]


def main(arguments: Sequence[str]) -> int:
    """Returns 0, 1 where nothing could be predicted, 2 where the command line is wrong."""
    parser = argparse.ArgumentParser(prog="python -m harness predict", add_help=False)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--tp", type=numbers, default=[])
    parser.add_argument("--batch", type=numbers, default=[])
    parser.add_argument("--model", type=lambda text: text.split(","), default=[])
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--csv", action="store_true")
    try:
        options = parser.parse_args(arguments)
    except SystemExit:
        return 2
    try:
        found, notes, groups = _predict(options)
    except (PredictionError, ConfigError, StoreError) as error:
        print(f"predict: {error}", file=sys.stderr)
        return 2 if isinstance(error, NoRunError) else 1
    if options.csv:
        import pandas as pd

        print(pd.DataFrame(found).to_csv(index=False).rstrip("\n"))
    else:
        tables = [*map(_fit_table, groups), _left_out_table(groups), *_rows_tables(found)]
        _show(tables, notes, options.markdown)
    if all(row["measured_us"] is not None for row in found):
        print(f"predict: {NOTHING}", file=sys.stderr)
    return int(not any(row["status"] == "predicted" for row in found))


def _predict(
    options: argparse.Namespace,
) -> tuple[list[dict[str, Any]], tuple[str, ...], list[Fitted]]:
    """Raises:
    PredictionError: no cells or no calibration of their machine; the text says what to do.
    """
    cells = measured(options.runs)
    path = options.calibration or path_of(options.runs[0].resolve().parent, cells.fingerprint)
    calibration = Calibration(path)
    read, matmul = calibration.figure("read_bytes_s"), calibration.figure("matmul_flops_s")
    if read is None or matmul is None:
        raise PredictionError(
            f"{path} holds no read bandwidth and matmul rate of the runs' machine; measure them "
            "there by python -m harness calibrate"
        )
    ceilings, curves = Ceilings(read, matmul), Curves(calibration.curve_rows())
    models = {name: shape_of(_section(name)) for name in options.model}
    groups = [fitted(group, ceilings, curves) for group in cells.groups]
    found = [
        row
        for group in groups
        for row in rows(
            group, ceilings, curves, tps=options.tp, batches=options.batch, models=models,
            memory_bytes=calibration.memory_bytes,
        )
    ]  # fmt: skip
    apart = [one for group in groups if group.fit is not None for one in group.apart]
    return found, (*cells.notes, *notes(apart)), groups


def _section(name: str) -> dict[str, Any]:
    """A published model by its name, any other by its directory or hub id; its shape is enough."""
    path = None if name in (*PUBLISHED, "tiny") else name
    return {"name": name, "path": path, "load_format": "dummy"}


def _show(tables: Sequence[Table], notes: Sequence[str], markdown: bool) -> None:
    if markdown:
        parts = [f"{title}\n\n{markdown_table(head, lines)}" for title, head, lines in tables]
        print("\n\n".join([*parts, *notes]))
        return
    console = stdout()
    for title, headings, lines in tables:
        print_line(console, f"\n{title}")
        right = [
            h
            for h in headings
            if h not in ("status", "model", "comm", "axis", "left out", "reason")
        ]
        print_table(console, headings, lines, wrapped="reason", right=right)
    for note in notes:
        print_line(console, note)


def _fit_table(group: Fitted) -> Table:
    headings = ["cells", "read efficiency", "matmul efficiency", "us a layer", "mean error %",
                "largest %", "reason"]  # fmt: skip
    cells = [str(len(group.group.cells))]
    if group.fit is None:
        line = cells + ["-"] * 5
    else:
        errors = [abs(error) for error in group.errors]
        read, matmul = (f"{1 / f:.2f}" if f else "-" for f in (group.fit.read, group.fit.matmul))
        line = [*cells, read, matmul, f"{group.fit.layers:.1f}",
                _percent(sum(errors) / len(errors)), _percent(max(errors))]  # fmt: skip
    return f"Fit: {group.group.title}", headings, [[*line, group.reason or ""]]


def _left_out_table(groups: Sequence[Fitted]) -> Table:
    headings = ["how", "axis", "left out", "cells", "mean error %", "largest %", "reason"]
    lines = [
        [group.group.title, one.axis, str(one.value),
         str(sum(getattr(c, one.axis) == one.value for c in group.group.cells)),
         _percent(one.mean), _percent(one.largest), one.reason or ""]
        for group in groups
        for one in group.left_out
    ]  # fmt: skip
    return "Errors on cells left out of the fit", headings, lines


def _rows_tables(found: Sequence[dict[str, Any]]) -> list[Table]:
    """The rows that were not measured as a table; none where there is none."""
    lengths = [n for n in ("prompt_tokens", "output_tokens") if len({row[n] for row in found}) > 1]
    headings = ["status", "model", "tp", "batch", *(name.replace("_", " ") for name in lengths),
                "comm", "eager", "compile", "step us", "read us", "matmul us", "layers us",
                "comm us", "comm %", "+- %", "reason"]  # fmt: skip
    lines = []
    for row in found:
        if row["status"] == "ok":
            continue
        times = ("predicted_us", "read_us", "matmul_us", "layers_us", "comm_us")
        cells = [str(row[name]) for name in ("status", "model", "tp", "batch", *lengths, "comm")]
        cells += [str(row["enforce_eager"]).lower(), str(row["compile"])]
        cells += ["-" if row[name] is None else f"{row[name]:,.0f}" for name in times]
        cells += [_percent(row["comm_share"]), _percent(row["expected_error"])]
        lines.append([*cells, row["reason"] or ""])
    title = "Predicted; +- is the mean error on cells left out along what is new in the row"
    return [(title, headings, lines)] if lines else []


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"
