"""The catalogue's tables as Arrow has them, and what is asked of a file that holds one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.tables import schema

if TYPE_CHECKING:
    import pyarrow as pa


class StoreError(ValueError):
    """A table that the catalogue does not allow, or a folder that cannot be read."""


class NoRunError(StoreError):
    """A folder that is not there, or is none of a run: a word of the command line is wrong."""


def arrow_schema(table: str) -> pa.Schema:
    """The catalogue's table as a pyarrow schema; units and meanings are field metadata."""
    import pyarrow as pa

    types = {
        "string": pa.string(),
        "int": pa.int64(),
        "float": pa.float64(),
        "bool": pa.bool_(),
        "time": pa.timestamp("us", tz="UTC"),
    }
    fields = [
        pa.field(
            c.name,
            types[c.dtype],
            nullable=not c.required,
            metadata={"unit": c.unit, "meaning": c.meaning},
        )
        for c in schema.TABLES[table]
    ]
    version = {"schema": f"rangefinder.{table}", "schema_version": str(schema.SCHEMA_VERSION)}
    return pa.schema(fields, metadata=version)


def damaged(path: Path, error: Exception) -> StoreError:
    """What is said of a table that cannot be read."""
    return StoreError(
        f"{path} is damaged ({' '.join(str(error).split())}); resume={path.parents[2]} beside the "
        "settings of the run measures its point again"
    )


def check_columns(path: Path, fields: Sequence[pa.Field]) -> None:
    """Reads the end of a file: its version, and whether the columns that may not be null are there.

    Raises:
        StoreError: another version.
        OSError, ArrowException: it cannot be read, or lacks a column.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    stored = pq.read_schema(path)
    check_version(path, stored.metadata)
    missing = [f.name for f in fields if not f.nullable and f.name not in stored.names]
    if missing:
        raise pa.ArrowInvalid(f"it has no column {missing[0]}")


def check_version(path: Path, metadata: Mapping[bytes, bytes] | None) -> None:
    found = (metadata or {}).get(b"schema_version", b"none").decode()
    if found != str(schema.SCHEMA_VERSION):
        raise StoreError(
            f"{path}: schema version {found}, this harness reads {schema.SCHEMA_VERSION}; read it "
            "with the version that wrote it"
        )


def pandas_type(kind: pa.DataType) -> Any:
    import pandas as pd
    import pyarrow as pa

    return {pa.int64(): pd.Int64Dtype(), pa.bool_(): pd.BooleanDtype()}.get(kind)
