"""Tidy DataFrames of stored results, with units: of one run, of many, of published files"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from harness.store import Results, StoreError, load
from harness.tables import engine_costs, schema
from harness.tables.fan_outs import runs_in
from harness.tables.figures import FIGURES
from harness.tables.report import AXES, FIGURE_OF, further
from harness.tables.report import summary as of_run

if TYPE_CHECKING:
    import pandas as pd

KEY = ("run_id", "point_id", "process")
_OF_POINT = (*KEY, "index", "experiment", "status", *AXES)
_OF_FIGURE = ("repeat", "name", "stat", "value", "unit", "n", "source", "pass", "phase", "kind",
              "site", "bytes", "ranks", "reason")  # fmt: skip


def summary_units() -> dict[str, str]:
    """Units of the columns of a summary that have one; 1: a ratio or a count."""
    units = {c.name: c.unit for c in schema.TABLES["points"] if c.unit}
    units |= {column: FIGURES[name].unit for column, (name, *_) in FIGURE_OF.items()}
    units |= {"spread": "1", "scaling_efficiency": "1"}
    units |= {f"start_{phase}_s": "s" for phase in engine_costs.STARTUP}
    return units | {f"memory_{name}_bytes": "B" for name in engine_costs.MEMORY}


def summary(results: Results) -> pd.DataFrame:
    """A row a point with its axes and figures (report.summary), of all runs of the folder, with
    run_id first; of a published folder without parquet, its CSV files of such rows, with the file's
    name as `file`. `frame.attrs["units"]` has the units.

    Raises:
        StoreError: neither is there, or a damaged file.
    """
    import pandas as pd

    runs = parts(results)
    frames = [_named(run, frame) for run, frame in zip(runs, of_runs(runs), strict=True)]
    if not runs:
        frames = [frame.assign(file=path.name) for path, frame in _csv_files(results.run_dir)]
    if not frames:
        raise StoreError(f"{results.run_dir} holds no run and no CSV of one")
    # A column without any value has no type to agree on.
    whole = pd.concat([frame.dropna(axis="columns", how="all") for frame in frames])
    names = dict.fromkeys(name for frame in frames for name in frame.columns)
    first = "run_id" if runs else "file"
    whole = whole.reindex(columns=[first, *(name for name in names if name != first)])
    whole = whole.reset_index(drop=True)
    whole.attrs["units"] = {k: v for k, v in summary_units().items() if k in whole}
    return whole


def figures(
    results: Results, names: Iterable[str], stat: str | None, repeats: bool
) -> pd.DataFrame:
    """Rows of the metrics table, each with the axes of its point.

    Args:
        names: figures of harness/tables/figures.py; none: all.
        stat: one of figures.STATS; None: all.
        repeats: the figures of single repeats too, not only those over all repeats of an engine.

    Returns:
        run_id, point_id, process, index, experiment, status, the axes, then repeat, name, stat,
        value, unit, n, source, pass, phase, kind, site, bytes, ranks, reason; `attrs["units"]` maps
        the names to units. Points without a figure (failed, skipped) have no row.

    Raises:
        KeyError: no such figure.
    """
    chosen = list(names)
    unknown = [name for name in chosen if name not in FIGURES]
    if unknown:
        raise KeyError(f"figure {unknown[0]!r}: choose among {', '.join(FIGURES)}")
    rows = results.table("metrics", [*KEY, *_OF_FIGURE])
    rows = rows[rows["name"].isin(chosen)] if chosen else rows
    rows = rows[rows["stat"] == stat] if stat is not None else rows
    rows = rows if repeats else rows[rows["repeat"].isna()]
    points = results.table("points", _OF_POINT).drop_duplicates(list(KEY))
    frame = points.merge(rows, on=list(KEY), validate="one_to_many")
    frame = frame.sort_values(["run_id", "index", "process"], kind="stable", ignore_index=True)
    frame.attrs["units"] = {name: FIGURES[name].unit for name in frame["name"].unique()}
    return frame


def parts(results: Results) -> list[Results]:
    """Each run of the folder by itself, and each fan-out: points are told apart by their id within
    one alone."""
    if len(results.folders()) == 1:
        return [results]
    return [load(one) for one in runs_in(results.run_dir)]


def of_runs(runs: Sequence[Results]) -> list[pd.DataFrame]:
    """The summary of each. A setting that has a column in one of them has it in all, so that a run
    that left it alone says its default."""
    frames = [of_run(run) for run in runs]
    names = list(dict.fromkeys(name for frame in frames for name in further(frame)))
    return [
        frame if {*names} <= {*frame} else of_run(run, names)
        for run, frame in zip(runs, frames, strict=True)
    ]


def _named(run: Results, frame: pd.DataFrame) -> pd.DataFrame:
    names = run.table("points", ["point_id", "run_id"]).drop_duplicates("point_id")
    return frame.merge(names, on="point_id", validate="one_to_one")


def _csv_files(folder: Path) -> list[tuple[Path, pd.DataFrame]]:
    """CSV files that hold a summary; others, such as repeats.csv, have readers of their own."""
    import pandas as pd

    found = []
    for path in sorted(folder.glob("*.csv")):
        try:
            frame = pd.read_csv(path)
        except (OSError, ValueError) as error:
            raise StoreError(f"{path} is no CSV: {' '.join(str(error).split())}") from error
        if {"status", "output_tok_s"} <= set(frame.columns) and "repeat" not in frame:
            found.append((path, frame))
    return found
