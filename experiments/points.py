"""The points of a run by what was asked of them, and how each ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.judging.cells import by_settings, shown_of
from harness.store import Results
from harness.tables.marker import worst_status
from harness.tables.report import settings


@dataclass(frozen=True, slots=True)
class Point:
    """One point of all its engines and repeats.

    Attributes:
        asked: settings that tell it from others; everything: all of them.
        mode: how its forward ran, as read back; None where no engine came up.
        reason: why its status is not ok.
    """

    point_id: str
    asked: dict[str, Any]
    everything: dict[str, Any]
    mode: str | None
    status: str
    reason: str | None

    @property
    def failure(self) -> str | None:
        """None for a point that was measured as it should be."""
        if self.status == "ok":
            return None
        return f"{self.status}: {self.reason}" if self.reason else self.status


def points(results: Results) -> list[Point]:
    """In the order of the run."""
    names = ["point_id", "index", "status", "reason", "requested", "effective.mode"]
    frame = results.table("points", names).sort_values("index", kind="stable")
    (cells,) = by_settings(frame)
    found = []
    for asked, rows in cells.values():
        for point_id, own in rows.groupby("point_id", sort=False):
            status = worst_status(own["status"])
            reasons = own[own["status"] == status]["reason"].dropna()
            modes = own["effective.mode"].dropna()
            found.append(
                Point(
                    str(point_id), asked, settings(str(own["requested"].iloc[0])),
                    str(modes.iloc[0]) if len(modes) else None, status,
                    str(reasons.iloc[0]) if len(reasons) else None,
                )
            )  # fmt: skip
    return found


def shown(found: Sequence[Point]) -> tuple[str, ...]:
    """Settings that vary, and those that every table has."""
    return shown_of([point.asked for point in found])


def named(asked: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: asked.get(name) for name in names}
