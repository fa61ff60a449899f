"""The tables of a point as Parquet files: checked by the catalogue, then written together."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.tables import schema
from harness.tables.arrow import StoreError, arrow_schema

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

TableData = Mapping[str, Any]  # column name -> list or array of values, all of one length


def to_arrow(table: str, data: TableData | pd.DataFrame) -> pa.Table:
    """Columns in the catalogue's order; a column left out is null, NaN becomes null.

    Raises:
        StoreError: an unknown table or column, a null in a required column, an infinite number, a
            value of another type, columns of different lengths.
    """
    import pyarrow as pa

    if table not in schema.TABLES:
        raise StoreError(f"table {table!r}: choose one of {', '.join(schema.TABLES)}")
    target = arrow_schema(table)
    unknown = [name for name in data if name not in target.names]
    if unknown:
        raise StoreError(f"{table}: columns {unknown} are not in the catalogue (tables/schema.py)")
    lengths = {name: len(data[name]) for name in data}
    if len(set(lengths.values())) > 1:
        raise StoreError(f"{table}: columns of different lengths: {lengths}")
    rows = next(iter(lengths.values()), 0)
    arrays = []
    for field in target:
        if field.name not in data:
            array = pa.nulls(rows, field.type)
        else:
            array = _convert(table, field, data[field.name])
        if not field.nullable and array.null_count:
            raise StoreError(f"{table}.{field.name}: {array.null_count} of {rows} values are null")
        arrays.append(array)
    return pa.Table.from_arrays(arrays, schema=target)


def _convert(table: str, field: pa.Field, values: Any) -> pa.Array:
    import pyarrow as pa
    import pyarrow.compute as pc

    try:
        array = pa.array(values, from_pandas=True)
        if field.type != pa.string() or array.type == pa.null():
            array = array.cast(field.type, safe=True)
        if isinstance(array, pa.ChunkedArray):
            array = array.combine_chunks()
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        raise StoreError(f"{table}.{field.name} holds {field.type}: {error}") from error
    if pa.types.is_large_string(array.type):
        array = array.cast(pa.string())
    if array.type != field.type:
        raise StoreError(f"{table}.{field.name} holds {field.type}, not {array.type}")
    if pa.types.is_floating(array.type) and pc.any(pc.is_inf(array)).as_py():
        raise StoreError(f"{table}.{field.name}: an infinite value; a missing figure is null")
    return array


def write_point(out_dir: Path, tables: Mapping[str, TableData | pd.DataFrame]) -> None:
    """Writes `<out_dir>/<table>.parquet` for each; all are checked before the first is written.

    Raises:
        StoreError: see `to_arrow`; or no points table, without which the point would be lost.
    """
    import pyarrow.parquet as pq

    arrow = {name: to_arrow(name, data) for name, data in tables.items()}
    if "points" not in arrow or arrow["points"].num_rows == 0:
        raise StoreError("a point needs at least one row in the table points")
    wrong = set(arrow["points"]["status"].to_pylist()) - set(schema.STATUSES)
    if wrong:
        raise StoreError(f"status {sorted(wrong)}: choose among {', '.join(schema.STATUSES)}")
    out_dir.mkdir(parents=True, exist_ok=True)
    for name, table in arrow.items():
        pq.write_table(table, out_dir / f"{name}.parquet", compression="zstd")
