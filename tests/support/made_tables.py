"""Run folders whose tables are made up row by row: what an experiment must find is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.rows.tables import columns
from harness.sweep.point import status_only_tables
from harness.tables.point_files import write_point
from tests.support.fake_backend import make_cfg, make_point
from tests.support.made_runs import MACHINE

Row = dict[str, Any]
STEP: Row = {
    "repeat": 0, "batch": 2, "tokens": 2, "bucket": 2, "samples": 2, "begin_ns": 0, "padding": 0.0,
    "phase": "decode", "source": "stamps",
}  # fmt: skip
COLLECTIVE: Row = {
    "repeat": 0, "phase": "decode", "kind": "all_reduce", "bytes": 64, "dtype": "bfloat16",
    "path": "nccl", "source": "stamps", "transfer_source": "ranks",
}  # fmt: skip
FIGURE: Row = {"stat": "value", "n": 1, "n_process": 1, "unit": "us", "source": "stamps"}


def write(
    run: Path,
    tables: Mapping[str, Sequence[Row]],
    *,
    index: int = 0,
    process: int = 0,
    mode: str = "graph",
    status: str = "ok",
    reason: str | None = None,
    **changes: Any,
) -> str:
    """A point with these rows, whose settings are fake_backend.make_cfg(**changes); -> its id."""
    point_id = f"{index:012x}"
    point = make_point(make_cfg(**changes), point_id, index)
    key = {"run_id": run.name, "point_id": point_id, "process": process}
    found: dict[str, Any] = status_only_tables(
        point, status, reason, run_id=run.name, process=process, environment=MACHINE,
        **{"effective.mode": mode},
    )  # fmt: skip
    found |= {name: columns(name, [key | row for row in rows]) for name, rows in tables.items()}
    write_point(run / "points" / f"{point_id}-{process}", found)
    return point_id
