"""Scaling efficiency of the points of a run, and why a point has none"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from harness.settings.config import as_written

OF_RANKS = ("tp", "comm")
"""Settings in which a point and the one of tp=1 that it is divided by may differ: one rank has no
collectives."""
NAMED = 3
"""Settings whose values are told at most; of more, their names."""
ARRIVALS = "requests arrive over time, which sets the throughput"


def scaling_efficiency(rows: Sequence[Mapping[str, Any]]) -> list[tuple[float | None, str | None]]:
    """(output_tok_s(tp) / (tp x output_tok_s(1)), None), with the point of tp=1 whose settings are
    all equal but for OF_RANKS; or (None, reason). `rows` have status, output_tok_s, tp and
    settings."""
    asked = [{k: v for k, v in row["settings"].items() if k not in OF_RANKS} for row in rows]
    keys = [json.dumps(one, sort_keys=True) for one in asked]
    alone = {key: row for key, row in zip(keys, rows, strict=True) if row["tp"] == 1}
    single = {
        key: float(row["output_tok_s"])
        for key, row in zip(keys, rows, strict=True)
        if row["status"] == "ok" and row["tp"] == 1 and row["output_tok_s"] is not None
    }

    def of(key: str, row: Mapping[str, Any]) -> tuple[float | None, str | None]:
        if row["status"] != "ok":
            return None, f"the point is {row['status']}"
        if row["output_tok_s"] is None:
            return None, "the point has no output_tok_s"
        if row["settings"]["workload.arrivals"] != "all":
            return None, ARRIVALS
        if key in single:
            return float(row["output_tok_s"]) / (int(row["tp"]) * single[key]), None
        if key in alone and alone[key]["status"] != "ok":
            return None, f"the point of tp=1 with these settings is {alone[key]['status']}"
        if not single:
            return None, "no point of tp=1 is ok" if alone else "there is no point of tp=1"
        return None, _nearest(json.loads(key), [json.loads(one) for one in single])

    return [of(key, row) for key, row in zip(keys, rows, strict=True)]


def _nearest(asked: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> str:
    """What differs to the point of tp=1 that differs in least."""

    def differing(other: Mapping[str, Any]) -> list[str]:
        names = dict.fromkeys([*asked, *other])
        return [name for name in names if asked.get(name) != other.get(name)]

    nearest = min(others, key=lambda other: len(differing(other)))
    names = differing(nearest)
    said = [f"{n}={as_written(nearest.get(n))}, not {as_written(asked.get(n))}" for n in names]
    near = " and ".join(said) if len(names) <= NAMED else f"it differs in {', '.join(names)}"
    return f"no point of tp=1 with these settings is ok (nearest: {near})"
