"""A machine's calibration as tables: figures of the device, and collectives by size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.calibration.file import OK, Calibration
from harness.calibration.parts import KINDS

Table = tuple[str, list[str], list[list[str]]]
"""(title, headings, rows of text)"""
WRAPPED = "how"
LEFT = ("figure", "unit", "source", WRAPPED, "part", "reason", "decode step")
_SCALES = {"B/s": (1e-9, "GB/s"), "1/s": (1e-12, "TFLOP/s")}


def tables(calibration: Calibration) -> list[Table]:
    """Figures, one table a kind, path and world, and what is not there with its reason."""
    parts = calibration.parts
    rows = [row for part in parts.values() for row in part["rows"] if "name" in row]
    headings = ["figure", "value", "unit", "p10", "p90", "n", "source", WRAPPED]
    found = [("", headings, [_figure(row) for row in rows])] if rows else []
    found += _curves(calibration.curve_rows())
    missing = [[name, p["status"], str(p["reason"])] for name, p in parts.items()
               if p["status"] != OK]  # fmt: skip
    if missing:
        found.append(("not measured", ["part", "status", "reason"], missing))
    return found


def _figure(row: Mapping[str, Any]) -> list[str]:
    factor, unit = _SCALES.get(row["unit"], (1.0, row["unit"]))
    values = [_number(row.get(name), factor) for name in ("value", "p10", "p90")]
    name = row["name"].removesuffix("_bytes_s").removesuffix("_flops_s").removesuffix("_us")
    return [name, values[0], unit, *values[1:], str(row["n"]), row["source"], row["how"]]


def _curves(rows: Sequence[Mapping[str, Any]]) -> list[Table]:
    groups: dict[tuple[str, str, int], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["kind"], row["path"], row["world"]), []).append(row)
    ordered = sorted(groups, key=lambda key: (key[2], key[1], KINDS.index(key[0])))
    return [_curve(key, groups[key]) for key in ordered]


def _curve(key: tuple[str, str, int], rows: Sequence[Mapping[str, Any]]) -> Table:
    """One line a size, eager and graph side by side."""
    kind, path, world = key
    first = rows[0]
    title = (
        f"{kind}, {path}, {world} ranks, {first['dtype']}; source {first['source']}, "
        f"tick {first['tick_us']:.3g} us" + (f"; of {first['holds']}" if "holds" in first else "")
    )
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    at = {(row["bytes"], row["mode"]): row for row in rows}
    headings = ["bytes", "decode step"]
    for mode in modes:
        headings += [f"{mode} us", "p10 - p90", "wait us", "algbw GB/s", "busbw GB/s", "n"]
    lines = []
    for size in sorted({row["bytes"] for row in rows}):
        marks = [row.get("mark") for row in rows if row["bytes"] == size]
        line = [as_bytes(size), marks[0] or ""]
        for mode in modes:
            line += _cells(at.get((size, mode)))
        lines.append(line)
    return title, headings, lines


def _cells(row: Mapping[str, Any] | None) -> list[str]:
    if row is None:
        return ["-"] * 6
    spread = "-" if row["p10_us"] is None else f"{row['p10_us']:.1f} - {row['p90_us']:.1f}"
    time_us = row["transfer_us"]
    stat = {"mean": " m", "p50": "  "}.get(row["stat"] or "", "")
    return [
        "-" if time_us is None else f"{time_us:.2f}{stat}",
        spread,
        _number(row["wait_us"]),
        _number(row["algbw_GBps"]),
        _number(row["busbw_GBps"]),
        str(row["n"]),
    ]


def remarks(calibration: Calibration) -> list[str]:
    """What is said below the tables."""
    shared = [
        name
        for name, part in calibration.parts.items()
        if any(value for key, value in part["state"].items() if key.endswith(".other_processes"))
    ]
    beside = [f"others computed on a GPU beside {', '.join(shared)}"] if shared else []
    return [NOTE, *beside]


NOTE = "us: median, or the mean (m) where the timer's tick is above 1 % of it; less the floor"


def _number(value: float | None, factor: float = 1.0) -> str:
    if value is None:
        return "-"
    scaled = value * factor
    return f"{scaled:,.0f}" if abs(scaled) >= 1000 else f"{scaled:.3g}"


def as_bytes(size: int) -> str:
    """2048 -> 2 KiB; what is no whole number of KiB stays in bytes."""
    for unit, scale in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size % scale == 0:
            return f"{size // scale} {unit}"
    return f"{size} B"
