"""Figures that no sound engine has: what a reader must see before believing a row"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from harness.measuring.window import Window
from harness.observers.records import DECODE

LEAST_REPLAYED = 0.9
LEAST_MBU = 0.05
MOST_EFFICIENCY = 1.15
FLAG = "flag: "
"""Notes that begin so stand in the printed table."""


def of_point(
    windows: Sequence[Window], figures: Sequence[Mapping[str, Any]], graphs: bool
) -> list[str]:
    """Notes on a point: decode steps that were launched where graphs were asked for, and a step far
    from what the machine reads in its time. (What was built inside the window is a status,
    `contaminated`.) A small model at a small batch may be flagged rightly: launches bound it."""
    found = []
    steps = [w.steps[0][w.steps[0]["phase"] == DECODE]["replayed"] for w in windows]
    replayed = np.concatenate([np.zeros(0, bool), *steps])
    if graphs and len(replayed) and replayed.mean() < LEAST_REPLAYED:
        found.append(
            f"{FLAG}{replayed.mean():.0%} of {len(replayed)} decode steps replayed a CUDA graph"
        )
    for row in figures:
        if row["name"] == "mbu" and row["value"] is not None and row["value"] < LEAST_MBU:
            found.append(f"{FLAG}a decode step uses {row['value']:.1%} of the read bandwidth")
        if row["name"] == "comm_share" and row["value"] is not None and row["value"] > 1:
            if (row.get("phase"), row.get("ranks")) == ("decode", "max"):
                found.append(
                    f"{FLAG}collectives of the timed pass last {row['value']:.0%} of a clean step"
                )
    return found


def of_scaling(tp: int, efficiency: float | None) -> str | None:
    """A note where ranks together do more than as many engines of one rank. A small gain can be
    real, where a shard fits into a cache and the whole did not; above it, the point of tp=1 was
    disturbed, or is another one."""
    if efficiency is None or efficiency <= MOST_EFFICIENCY:
        return None
    return (
        f"{FLAG}tp={tp} does {efficiency:.2f} times what {tp} engines of tp=1 do: was the point of "
        "tp=1 disturbed?"
    )
