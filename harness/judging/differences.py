"""Where two runs of one request differ: settings of one side, and what its `auto` became."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from harness.settings.config import as_written
from harness.tables.report import RANKED, REMARKED, remarked, settings

if TYPE_CHECKING:
    import pandas as pd

PASSING = ("cache_dir", "num_pages")
"""Effective values of one engine and not of its code: a cold engine's fresh folder, and the pages
that free memory has room for."""
Values = dict[str, list[str]]
"""Name -> its values in the engines of a side, as a command line has them."""


def of_one_side(a: pd.DataFrame, b: pd.DataFrame, left_out: tuple[str, ...]) -> Iterator[str]:
    """`engine.fused: no such setting in A, auto in B`, for each setting that only one side knows.
    Nothing is said of `left_out`, settings or whole sections."""
    known: list[dict[str, Any]] = []
    for frame in (a, b):
        asked = [settings(str(text)) for text in frame["requested"].unique()]
        known.append({name: value for one in asked for name, value in one.items()})
    for name in sorted(known[0].keys() ^ known[1].keys()):
        if name.partition(".")[0] not in left_out:
            said = [as_written(s[name]) if name in s else "no such setting" for s in known]
            yield f"{name}: {said[0]} in A, {said[1]} in B"


def effective(a: pd.DataFrame, b: pd.DataFrame) -> tuple[str, ...]:
    """`attention: flash2 in A, flash2_triton in B`, for each value that the engines of one point
    read back otherwise on the other side; of PASSING nothing.

    `settings: not known in A` is of a side that was measured and does not hold what it ran, as
    repeats that were published before they did. Nothing is said where a side has no engine."""
    sides = {"A": a, "B": b}
    found = {name: _values(side) for name, side in sides.items()}
    lacking = [name for name, values in found.items() if values is None]
    if lacking:
        measured = [name for name in lacking if sides[name]["status"].isin(RANKED).any()]
        return (f"settings: not known in {' and '.join(measured)}",) if measured else ()
    one, other = (values or {} for values in found.values())
    names = [n for n in sorted({*one, *other}) if n not in PASSING and one.get(n) != other.get(n)]
    return tuple(f"{n}: {_said(one.get(n))} in A, {_said(other.get(n))} in B" for n in names)


def _values(side: pd.DataFrame) -> Values | None:
    """None where no row says what ran."""
    engines = [json.loads(text) for text in side["effective"].dropna().unique()]
    if not engines:
        return None
    names = {name for engine in engines for name in engine}
    return {
        name: sorted({as_written(engine[name]) for engine in engines if name in engine})
        for name in names
    }


def _said(values: list[str] | None) -> str:
    """None: the version of the harness that ran did not read it back."""
    return "not known" if values is None else " and ".join(values)


def disturbed(*sides: pd.DataFrame) -> Iterator[str]:
    """What the notes of A's and B's rows are about, of those that a summary shows."""
    for name, side in zip("AB", sides, strict=True):
        notes = [note for text in side["notes"].dropna().unique() for note in remarked(text)]
        kinds = [kind for kind in REMARKED if any(note.startswith(kind) for note in notes)]
        if kinds:
            said = ", ".join(kind.removesuffix(": ") for kind in kinds)
            yield f"{name} was measured with the notes {said}"
