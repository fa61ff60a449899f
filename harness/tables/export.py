"""A run for others: a row a point that stands alone, as JSON, CSV or markdown"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from harness.machine.hardware import VERSIONS
from harness.settings import naming
from harness.settings.effective import EFFECTIVE
from harness.store import Results, opened
from harness.tables import engine_costs, report
from harness.tables.frames import of_runs, parts, summary_units
from harness.tables.plain import jsonable
from harness.tables.schema import SCHEMA_VERSION

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd

FORMAT = "rangefinder.summary"
ORIGIN = ("run_id", "experiment", "backend", *(f"effective.{name}" for name in EFFECTIVE),
          "measure", "instrument", "git_sha", "git_dirty", "hardware_fingerprint", "host", "cpu",
          "cpu_cores", "gpu", "driver", *(f"{name}_version" for name in VERSIONS), "started_at",
          )  # fmt: skip
"""Columns of the points table behind those of the summary: what ran, on what, where and when."""
_COSTS = engine_costs.COLUMNS
NULLABLE = (*report.FIGURE_OF, "spread", "scaling_efficiency", "phase", *_COSTS)
"""Columns whose null has a reason in JSON; in others null is a value, or nothing was said."""


def frame(run: str | Path | Results) -> pd.DataFrame:
    """The summary with ORIGIN behind it. Whatever a run measured, these columns are there; only
    settings that are no axis and vary, or differ from their default, come on top.

    Raises:
        StoreError: no such run, or a damaged file.
    """
    import pandas as pd

    runs = parts(opened(run))
    frames = [_frame(one, found) for one, found in zip(runs, of_runs(runs), strict=True)]
    return pd.concat(frames, ignore_index=True)


def _frame(results: Results, found: pd.DataFrame) -> pd.DataFrame:
    points = results.table("points", ["point_id", *ORIGIN]).drop_duplicates("point_id")
    further = [name for name in ORIGIN if name not in found]
    whole = found.merge(points[["point_id", *further]], on="point_id", validate="one_to_one")
    return whole.astype({"git_dirty": object})


def csv(run: str | Path | Results) -> str:
    """The frame as CSV; a missing value is an empty field."""
    return str(frame(run).to_csv(index=False))


def markdown(run: str | Path | Results) -> str:
    """The printed table, and below it what its rows were measured on; of several runs, each."""
    texts = [f"{report.markdown(one)}\n\n{origin(frame(one))}" for one in parts(opened(run))]
    return "\n\n".join(texts)


def origin(whole: pd.DataFrame) -> str:
    """Machine, commit and versions in one line; what differs between the rows is listed."""

    def of(name: str) -> str:
        return ", ".join(map(str, whole[name].dropna().unique()))

    said = [of("run_id")]
    if of("hardware_fingerprint"):
        machine = of("gpu") or of("cpu")
        said.append(f"{machine} ({of('hardware_fingerprint')}) of {of('host')}")
    if of("git_sha"):
        changed = " with changed files" if whole["git_dirty"].eq(True).any() else ""
        said.append(f"commit {of('git_sha')}{changed}")
    versions = [f"{name} {of(f'{name}_version')}" for name in VERSIONS if of(f"{name}_version")]
    return ", ".join([*said, *versions])


def rows(run: str | Path | Results) -> list[dict[str, Any]]:
    """The frame as plain dicts that JSON can hold, each with `settings`, everything that was asked
    for, and `reasons`, why each figure of NULLABLE that is null is so."""
    runs = parts(opened(run))
    frames = of_runs(runs)
    return [row for one, found in zip(runs, frames, strict=True) for row in _rows(one, found)]


def _rows(results: Results, summary: pd.DataFrame) -> list[dict[str, Any]]:
    whole = _frame(results, summary).astype(object)
    requested = results.table("points", ["point_id", "requested"]).drop_duplicates("point_id")
    asked = dict(zip(requested["point_id"], requested["requested"], strict=True))
    reasons = _Reasons(results)
    found = []
    for record in whole.to_dict("records"):
        row = {str(name): _plain(value) for name, value in record.items()}
        row["settings"] = naming.settings(json.loads(asked[row["point_id"]]))
        row["reasons"] = {name: reasons.of(row, name) for name in NULLABLE if row[name] is None}
        found.append(row)
    return found


def to_json(run: str | Path | Results) -> str:
    """One JSON object: format, version, units by column, rows; strict, null for what is missing."""
    found = rows(run)
    columns = found[0] if found else {}
    units = {name: unit for name, unit in summary_units().items() if name in columns}
    whole = {"format": FORMAT, "version": SCHEMA_VERSION, "units": units, "rows": found}
    return json.dumps(whole, indent=1, allow_nan=False)


def _plain(value: Any) -> Any:
    import pandas as pd

    return None if pd.isna(value) else jsonable(value)


class _Reasons:
    """Why figures are null, from the reasons that the tables hold."""

    def __init__(self, results: Results) -> None:
        self.tables = {}
        for table, names in (
            ("metrics", ["name", "stat", "phase", "ranks"]), ("phases", ["phase"]),
            ("memory", ["name"]),
        ):  # fmt: skip
            rows = results.table(table, ["point_id", *names, "reason"])
            rows = rows[rows["reason"].notna()]
            self.tables[table] = {str(k): group for k, group in rows.groupby("point_id")}

    def of(self, row: dict[str, Any], column: str) -> str:
        if row["status"] not in report.RANKED:
            why = f": {row['reason']}" if row["reason"] else ""
            return f"the point is {row['status']}{why}"
        if column in report.FIGURE_OF:
            name, stat, where = report.FIGURE_OF[column]
            phase = {"phase": row["phase"]} if column in report.BY_PHASE else {}
            return self._stored(row, "metrics", name=name, stat=stat, **where, **phase)
        if column.startswith("start_"):
            phase_name = column.removeprefix("start_").removesuffix("_s")
            return self._stored(row, "phases", phase=phase_name)
        if column.startswith("memory_"):
            return self._stored(row, "memory", name=column.removeprefix("memory_"))
        return {
            "spread": "one repeat has no spread",
            "scaling_efficiency": row["scaling_reason"],
            "compile_cache": "nothing was compiled, or the engine does not count it",
            "phase": "no step was timed",
        }[column]  # fmt: skip

    def _stored(self, row: dict[str, Any], table: str, **where: str | None) -> str:
        found = self.tables[table].get(row["point_id"])
        for name, value in where.items():
            if found is not None:
                found = found[found[name] == value] if value is not None else found
        if found is None or found.empty:
            return f"not measured, and {table} gives no reason"
        return str(found["reason"].iloc[0])
