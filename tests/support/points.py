"""A point measured on a FakeBackend, and one figure of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from harness.store import Results, load
from harness.sweep.point import PointOutcome, measure_point
from tests.support.fake_backend import FakeBackend, make_cfg, make_point


def measure(
    tmp_path: Path, backend: FakeBackend | None = None, **changes: Any
) -> tuple[PointOutcome, Results, FakeBackend]:
    """How it ended, what it left of run7, and the backend; `changes` are of the configuration."""
    cfg = make_cfg(**changes)
    backend = backend or FakeBackend(cfg)
    point = make_point(cfg)
    outcome = measure_point(backend, point, tmp_path / "run7" / "points" / point.point_id)
    return outcome, load(tmp_path / "run7"), backend


def figure(results: Results, name: str, stat: str, **where: Any) -> Any:
    """The one value of that figure; over all repeats unless `repeat` is given."""
    rows = results.metrics
    rows = rows[(rows["name"] == name) & (rows["stat"] == stat)]
    where.setdefault("repeat", None)
    for column, value in where.items():
        rows = rows[rows[column].isna() if value is None else rows[column] == value]
    assert len(rows) == 1, rows
    value = rows.iloc[0]["value"]
    return None if pd.isna(value) else value
