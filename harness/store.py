"""Results: the tables of one run, or of several, read a column at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.tables import schema
from harness.tables.arrow import NoRunError as NoRunError
from harness.tables.arrow import StoreError as StoreError
from harness.tables.arrow import arrow_schema, check_version, damaged, pandas_type
from harness.tables.fan_outs import expanded, is_fan_out, runs_in

if TYPE_CHECKING:
    import pandas as pd

    from harness.tables.merged import Merged


class Results:
    """The tables of one run, or of all runs in a folder. Nothing is read before it is asked for.

    `results.metrics` is the whole table; `results.table("collectives", ["latency_us"])` reads that
    column alone from every point's file. Integers and booleans are pandas' nullable types, so that
    a missing value stays missing. `frame.attrs["units"]` has the unit of each column that has one.
    """

    def __init__(self, run_dir: Path, tables: Sequence[str], columns: Sequence[str] | None) -> None:
        self.run_dir = run_dir
        self._tables = tuple(tables)
        self._columns = columns

    def files(self, table: str) -> list[Path]:
        """One file a finished point that has the table, and one of its profile by nsys; folders
        still being written start with a dot and are not seen."""
        found = [
            path for run in self.folders() for path in sorted(run.glob(f"points/*/{table}.parquet"))
        ]
        return [path for path in found if not path.parent.name.startswith(".")]

    def folders(self) -> list[Path]:
        """The folder itself if it is a run's, else the runs in it, those of fan-outs as well."""
        return expanded(runs_in(self.run_dir))

    def table(self, name: str, columns: Iterable[str] | None = None) -> pd.DataFrame:
        """The rows of all points; `columns` in the order given. A column that came into the
        catalogue after a file was written is null there; one that may not be null must be there.

        Raises:
            KeyError: no such table or column.
            StoreError: a damaged file, or one of another schema version.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._check_loaded(name)
        wanted = list(columns if columns is not None else (self._columns or ()))
        wanted = [schema.column(name, c).name for c in wanted]
        wanted = wanted or [c.name for c in schema.TABLES[name]]
        fields = pa.schema([arrow_schema(name).field(c) for c in wanted])
        parts = []
        for path in self.files(name):
            try:
                with pq.ParquetFile(path) as file:
                    check_version(path, file.schema_arrow.metadata)
                    there = set(file.schema_arrow.names)
                    read = [f.name for f in fields if f.name in there or not f.nullable]
                    parts.append(file.read(columns=read).select(read))
            except (OSError, pa.ArrowException, KeyError) as error:
                raise damaged(path, error) from error
        # The catalogue's own fields stand first, so that every column is there and in order.
        merged = pa.concat_tables([fields.empty_table(), *parts], promote_options="permissive")
        frame = merged.to_pandas(types_mapper=pandas_type)
        frame.attrs["units"] = {c: unit for c, unit in units(name).items() if c in frame}
        return frame

    def scan(
        self, name: str, columns: Sequence[str], where: Mapping[str, Any] | None = None
    ) -> pd.DataFrame:
        """Some columns of some rows, of a table that may be larger than memory: other columns,
        other rows and the files of other points are not read. Text is categorical.

            results.scan("collectives", ["site", "tp", "latency_us"], {"phase": "decode", "tp": 2})

        Args:
            columns: of the table, or of `points` where they are one value for all repeats of a
                point (tp, batch, model, ...).
            where: column -> the value of the rows that are kept, or a list of values; None: null.

        Raises:
            KeyError: no such table or column.
            StoreError: a damaged file, or one of another schema version.
        """
        from harness.tables.scan import scan

        self._check_loaded(name)
        return scan(self, name, columns, where or {})

    def quantiles(
        self,
        name: str,
        value: str,
        by: Sequence[str],
        q: Sequence[float] = (0.5,),
        where: Mapping[str, Any] | None = None,
    ) -> pd.DataFrame:
        """Exact quantiles of one column for each combination of `by`; columns as for `scan`.

            results.quantiles("collectives", "latency_us", by=["site", "tp", "mode"])

        -> a row a combination, in order: `by`, n (values that are not null), p50 or what `q` asks
        for (shares from 0 to 1; between two values linearly, as pandas does). In memory are the
        values of the one column, 8 bytes each, and one file's rows at a time.

        Raises:
            KeyError, StoreError: as for `scan`.
            ValueError: a share outside of 0 to 1, a column without numbers.
        """
        from harness.tables.scan import quantiles

        self._check_loaded(name)
        return quantiles(self, name, value, by, q, where or {})

    def _check_loaded(self, name: str) -> None:
        if name not in self._tables:
            raise KeyError(f"table {name!r} was not loaded: choose one of {self._tables}")
        if not self.folders():
            raise NoRunError(
                f"{self.run_dir} holds no run: neither it nor a folder in it has points/"
            )

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *schema.TABLES]

    def figures(self, *names: str, stat: str | None = None, repeats: bool = False) -> pd.DataFrame:
        """Figures, each with the axes of its point; see `frames.figures`."""
        from harness.tables import frames

        return frames.figures(self, names, stat, repeats)

    @cached_property
    def summary(self) -> pd.DataFrame:
        """A row a point with its axes and figures; see `frames.summary`."""
        from harness.tables import frames

        return frames.summary(self)

    @cached_property
    def points(self) -> pd.DataFrame:
        return self.table("points")

    @cached_property
    def metrics(self) -> pd.DataFrame:
        return self.table("metrics")

    @cached_property
    def steps(self) -> pd.DataFrame:
        return self.table("steps")

    @cached_property
    def collectives(self) -> pd.DataFrame:
        return self.table("collectives")

    @cached_property
    def requests(self) -> pd.DataFrame:
        return self.table("requests")

    @cached_property
    def phases(self) -> pd.DataFrame:
        return self.table("phases")

    @cached_property
    def memory(self) -> pd.DataFrame:
        return self.table("memory")

    @cached_property
    def telemetry(self) -> pd.DataFrame:
        return self.table("telemetry")

    @cached_property
    def kernels(self) -> pd.DataFrame:
        return self.table("kernels")

    @cached_property
    def ranges(self) -> pd.DataFrame:
        return self.table("ranges")


def units(table: str) -> dict[str, str]:
    """Column -> unit, of the columns that have one; 1: a ratio.

    Raises:
        KeyError: no such table.
    """
    schema.column(table, "point_id")
    return {column.name: column.unit for column in schema.TABLES[table] if column.unit}


def load(
    run_dir: str | Path,
    tables: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
) -> Results:
    """Opens a run's folder, a fan-out's (its jobs' runs as one), one of several runs (results/runs)
    or a published one; `tables` limits which may be asked for, `columns` what they hold.

    Raises:
        NoRunError: no such folder, or a fan-out without a run.
        KeyError: no such table.
    """
    path = Path(run_dir)
    if not path.is_dir():
        raise NoRunError(f"{path}: no such run folder")
    chosen = list(tables) if tables is not None else list(schema.TABLES)
    for name in chosen:
        schema.column(name, "point_id")
    if is_fan_out(path):
        from harness.tables.merged import of_fan_out

        return of_fan_out(path, chosen, columns)
    return Results(path, chosen, columns)


def merge(runs: Sequence[str | Path], *, across_machines: bool = False) -> Merged:
    """Opens several run folders as one, each point from one of them; see `merged.merge`."""
    from harness.tables import merged

    return merged.merge([Path(run) for run in runs], across_machines=across_machines)


def opened(run: str | Path | Results) -> Results:
    """Tables that are open already, or those of a run's folder."""
    return run if isinstance(run, Results) else load(run)
