"""Tables of any size: the rows and columns that a question needs, one file at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.tables import schema
from harness.tables.arrow import StoreError, arrow_schema, check_columns, damaged, pandas_type

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    import pyarrow.dataset as ds

    from harness.store import Results

Where = Mapping[str, Any]
"""Column -> the value that kept rows have, a list of such values, or None where it is null."""


def scan(results: Results, table: str, columns: Sequence[str], where: Where) -> pd.DataFrame:
    """See `Results.scan`."""
    import pyarrow as pa

    parts = list(_parts(results, table, columns, where))
    whole = pa.concat_tables([_fields(table, columns).empty_table(), *parts])
    frame: pd.DataFrame = whole.unify_dictionaries().to_pandas(
        types_mapper=pandas_type, split_blocks=True
    )
    units = {name: _column(table, name).unit for name in frame}
    frame.attrs["units"] = {name: unit for name, unit in units.items() if unit}
    return frame


def quantiles(
    results: Results, table: str, value: str, by: Sequence[str], q: Sequence[float], where: Where
) -> pd.DataFrame:
    """See `Results.quantiles`."""
    import pandas as pd

    if wrong := [one for one in q if not 0 <= one <= 1]:
        raise ValueError(f"quantile {wrong[0]}: give shares from 0 to 1")
    if _column(table, value).dtype not in ("int", "float"):
        raise ValueError(f"{table}.{value} holds {_column(table, value).dtype}: give numbers")
    values: dict[tuple[Any, ...], list[np.ndarray]] = {}
    for part in _parts(results, table, [*by, value], where):
        for key, of_key in _split(part, by, value):
            values.setdefault(key, []).append(of_key)
    rows = []
    for key in sorted(values, key=lambda key: [(one is None, one) for one in key]):
        whole = np.concatenate(values.pop(key))
        found = np.quantile(whole, q) if len(whole) else [math.nan] * len(q)
        rows.append([*key, len(whole), *found])
    return pd.DataFrame(rows, columns=[*by, "n", *(f"p{100 * one:g}" for one in q)])


def _split(
    part: pa.Table, by: Sequence[str], value: str
) -> Iterator[tuple[tuple[Any, ...], np.ndarray]]:
    """(key, its values without nulls) of the rows of one file."""
    if part.num_rows == 0:
        return
    codes = np.zeros(part.num_rows, np.int64)
    known: list[list[Any]] = []
    for name in by:
        column = part[name].combine_chunks()
        if not hasattr(column, "dictionary"):
            column = column.dictionary_encode()
        known.append([*column.dictionary.to_pylist(), None])
        own = column.indices.fill_null(len(known[-1]) - 1).to_numpy(zero_copy_only=False)
        codes = codes * len(known[-1]) + own
    groups = math.prod(map(len, known))
    # Few groups: 16 bits, which numpy sorts by digits, ten times as fast as 64.
    codes = codes.astype(np.uint16 if groups <= 2**16 else np.int64)
    order = np.argsort(codes, kind="stable")
    codes = codes[order]
    values = part[value].to_numpy()[order]
    begins = np.flatnonzero(np.r_[True, codes[1:] != codes[:-1]])
    for begin, end in zip(begins, [*begins[1:], len(codes)], strict=True):
        key, code = [], int(codes[begin])
        for names in reversed(known):
            code, place = divmod(code, len(names))
            key.append(names[place])
        of_key = values[begin:end]
        yield tuple(reversed(key)), of_key[~np.isnan(of_key)]


def _parts(
    results: Results, table: str, columns: Sequence[str], where: Where
) -> Iterator[pa.Table]:
    """The asked rows of each file, text dictionary-encoded, files of other points left closed."""
    import pyarrow as pa
    import pyarrow.dataset as ds
    from pyarrow.fs import LocalFileSystem

    wanted = list(dict.fromkeys([*columns, *where]))
    own = {column.name for column in schema.TABLES[table]}
    of_point = [name for name in wanted if _column(table, name) and name not in own]
    condition = _condition(table, where, own)
    settings = _settings(results, of_point)
    fields = _fields(table, wanted)
    text = [f.name for f in fields if f.name in own and pa.types.is_dictionary(f.type)]
    form = ds.ParquetFileFormat(read_options=ds.ParquetReadOptions(dictionary_columns=text))
    for path in results.files(table):
        of_this = settings.get(path.parent.name.partition("-")[0], {})
        if of_point and not of_this:
            raise StoreError(f"{path}: the table of points has no row of its point")
        if not all(_kept(of_this[name], where[name]) for name in of_point if name in where):
            continue
        try:
            check_columns(path, [arrow_schema(table).field(n) for n in wanted if n in own])
            fragment = form.make_fragment(str(path), LocalFileSystem())
            asked = _fields(table, [name for name in wanted if name in own])
            part = fragment.to_table(
                schema=asked, columns=[n for n in columns if n in own], filter=condition
            )
        except (OSError, pa.ArrowException) as error:
            raise damaged(path, error) from error
        for place, name in enumerate(columns):
            if name not in own:
                field = fields.field(name)
                one = pa.array([of_this[name]], _plain(field.type))
                filled = one.take(pa.array(np.zeros(part.num_rows, np.int8)))
                filled = filled.dictionary_encode() if field.type != filled.type else filled
                part = part.add_column(place, field, filled)
        yield part.cast(_fields(table, columns))


def _settings(results: Results, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Point -> what its rows of `points` say of the named columns.

    Raises:
        KeyError: a column that is not one value for a point.
    """
    if not names:
        return {}
    frame = results.table("points", ["point_id", *names])
    found: dict[str, dict[str, Any]] = {}
    for point_id, rows in frame.groupby("point_id", sort=False):
        for name in names:
            values = rows[name].astype(object).where(rows[name].notna(), None).unique()
            if len(values) > 1:
                raise KeyError(f"points.{name} is not one value for all repeats of a point")
            found.setdefault(str(point_id), {})[name] = values[0]
    return found


def _column(table: str, name: str) -> schema.Column:
    """Of the table, or, where it has none, of the points."""
    own = {column.name for column in schema.TABLES[table]}
    in_points = any(column.name == name for column in schema.TABLES["points"])
    return schema.column("points" if name not in own and in_points else table, name)


def _fields(table: str, names: Sequence[str]) -> pa.Schema:
    import pyarrow as pa

    own, points = arrow_schema(table), arrow_schema("points")
    fields = [(own if name in own.names else points).field(name) for name in names]
    text = pa.dictionary(pa.int32(), pa.string())
    return pa.schema(
        [pa.field(f.name, text if f.type == pa.string() else f.type, True) for f in fields]
    )


def _plain(kind: pa.DataType) -> pa.DataType:
    import pyarrow as pa

    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _kept(found: Any, asked: Any) -> bool:
    return found in asked if isinstance(asked, list | tuple | set) else found == asked


def _condition(table: str, where: Where, own: set[str]) -> ds.Expression | None:
    """What is asked of a file's own columns; values for columns of `points` are checked alone.

    Raises:
        StoreError: a value of another type than its column's.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    found = None
    for name, asked in where.items():
        kind = _plain(_fields(table, [name]).field(name).type)
        values = list(asked) if isinstance(asked, list | tuple | set) else [asked]
        try:
            allowed = pa.array(values, kind)
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise StoreError(
                f"where {name}={asked!r}: the column holds {_column(table, name).dtype}"
            ) from error
        if name in own:
            one = pc.field(name).is_null() if asked is None else pc.field(name).isin(allowed)
            found = one if found is None else found & one
    return found
