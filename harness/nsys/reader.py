"""An nsys export in sqlite as tables: NVTX ranges, kernels, calls that launched them.

Form and event numbers as `nsys export --type sqlite` writes them (User Guide, "SQLite Schema
Reference"). It creates a table only if there are rows for it, so a missing one is no fault.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

SCHEMA_MAJOR, WRITERS = 3, "2025.3"
"""Version of the form that is read here, and an nsys that writes it (3.20.3)."""
_RANGES = (59, 60)  # push/pop, start/end
_CATEGORY, _DOMAIN = 33, 75  # events that name one
_PAYLOADS = ("int64Value", "uint64Value", "int32Value", "uint32Value", "doubleValue", "floatValue")
_PID_SHIFT, _PID_MASK = 24, 0xFFFFFF  # of a serialized GlobalId
NVTX, KERNELS, RUNTIME, GRAPHS, STRINGS, META = (
    "NVTX_EVENTS", "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE", "StringIds", "META_DATA_EXPORT",
)  # fmt: skip
# What is read of each table; with a ? it may be missing, and is null then.
_COLUMNS = {
    NVTX: ("start", "end", "eventType", "category", "text", "globalTid", "textId", "domainId",
           *(f"{name}?" for name in _PAYLOADS)),
    KERNELS: ("start", "end", "deviceId", "streamId", "correlationId", "globalPid", "shortName",
              "graphNodeId?"),
    RUNTIME: ("start", "globalTid", "correlationId"),
    STRINGS: ("id", "value"),
    META: ("name", "value"),
}  # fmt: skip
_Rows = Iterator[tuple[Any, ...]]


class ExportError(ValueError):
    """A file that is no export this reader knows; the text says what it is or lacks."""


@dataclass(frozen=True, slots=True)
class Export:
    """What an export holds. Times are ns on nsys's clock, the same for host and devices.

    Attributes:
        product: nsys's version; None where the export does not say.
        ranges: pid, tid, domain, category, message, payload, start_ns, end_ns, by start; end_ns is
            <NA> where the capture ended first. `tid` is nsys's global one.
        kernels: pid, device, stream, correlation, name, graph_node, start_ns, end_ns, by start;
            graph_node is <NA> outside CUDA graphs.
        launches: pid, tid, correlation, start_ns: calls of the CUDA API, first of each correlation.
        whole_graphs: launches of graphs recorded as a whole, without their kernels.
        missing: tables that are read here and are not there.
    """

    path: Path
    product: str | None
    ranges: pd.DataFrame
    kernels: pd.DataFrame
    launches: pd.DataFrame
    whole_graphs: int
    missing: tuple[str, ...]


def read(path: str | Path) -> Export:
    """Reads an export.

    Raises:
        ExportError: no such file, no sqlite, another schema version, or a table without a column.
    """
    path = Path(path)
    if not path.is_file():
        raise ExportError(f"{path}: no such file")
    if path.suffix == ".nsys-rep":
        raise ExportError(f"{path} is a report; export it: nsys export --type=sqlite {path.name}")
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as database:
            return _Tables(path, database).export()
    except sqlite3.DatabaseError as error:
        raise ExportError(f"{path} is no export in sqlite: {error}") from error


def pid_of(global_id: int) -> int:
    """The process of a serialized GlobalId, globalTid or globalPid."""
    return (global_id >> _PID_SHIFT) & _PID_MASK


class _Tables:
    def __init__(self, path: Path, database: sqlite3.Connection) -> None:
        self.path, self.database = path, database
        found = database.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")
        self.present = {name for (name,) in found}
        self.schema = "not given"
        meta: dict[str, str] = dict(self._rows(META))
        self.product = meta.get("EXPORT_PRODUCT_VERSION")
        self.schema = meta.get("EXPORT_SCHEMA_VERSION", self.schema)
        if "EXPORT_SCHEMA_VERSION" in meta and not self.schema.startswith(f"{SCHEMA_MAJOR}."):
            raise ExportError(
                f"{path}: schema version {self.schema} (nsys {self.product}); this reader knows "
                f"{SCHEMA_MAJOR}.x, which nsys {WRITERS} writes"
            )
        self.strings: dict[int, str] = dict(self._rows(STRINGS))

    def export(self) -> Export:
        whole = 0
        if GRAPHS in self.present:
            (whole,) = self.database.execute(f"SELECT count(*) FROM {GRAPHS}").fetchone()
        return Export(
            self.path, self.product, self._ranges(), self._kernels(), self._launches(), whole,
            tuple(name for name in _COLUMNS if name not in self.present),
        )  # fmt: skip

    def _rows(self, table: str, order: str = "") -> _Rows:
        """The rows of _COLUMNS; none where the table is missing."""
        if table not in self.present:
            return iter(())
        there = {row[1] for row in self.database.execute(f"PRAGMA table_info({table})")}
        wanted = []
        for column in _COLUMNS[table]:
            name = column.rstrip("?")
            if name not in there and not column.endswith("?"):
                raise ExportError(
                    f"{self.path}: {table} has no column {name}; this reader does not know its "
                    f"form (schema version {self.schema}; nsys {WRITERS} writes one that it knows)"
                )
            wanted.append(f'"{name}"' if name in there else "NULL")
        return self.database.execute(f"SELECT {', '.join(wanted)} FROM {table} {order}")

    def _ranges(self) -> pd.DataFrame:
        events = [row for row in self._rows(NVTX, 'ORDER BY start, "end" DESC') if row[5]]
        named: dict[tuple[int, ...], str | None] = {}
        for _, _, kind, category, text, tid, text_id, domain, *_ in events:
            text = self.strings.get(text_id) if text is None else text
            if kind == _DOMAIN:
                named[pid_of(tid), domain] = text
            elif kind == _CATEGORY:
                named[pid_of(tid), domain, category] = text
        rows = []
        for start, end, kind, category, text, tid, text_id, domain, *payloads in events:
            if kind in _RANGES:
                pid = pid_of(tid)
                message = self.strings.get(text_id) if text is None else text
                payload = next((value for value in payloads if value is not None), None)
                rows.append((pid, tid, named.get((pid, domain)),
                             named.get((pid, domain, category)), message, payload, start,
                             end))  # fmt: skip
        names = ("domain", "category", "message")
        return _frame(rows, ("pid", "tid", *names, "payload", "start_ns", "end_ns"), text=names,
                      real=("payload",))  # fmt: skip

    def _kernels(self) -> pd.DataFrame:
        rows = [
            (pid_of(pid), device, stream, correlation, self.strings.get(name), node, start, end)
            for start, end, device, stream, correlation, pid, name, node in self._rows(
                KERNELS, "ORDER BY start"
            )
        ]
        columns = ("pid", "device", "stream", "correlation", "name", "graph_node")
        return _frame(rows, (*columns, "start_ns", "end_ns"), text=("name",))

    def _launches(self) -> pd.DataFrame:
        first: dict[tuple[int, int], tuple[int, ...]] = {}
        for start, tid, correlation in self._rows(RUNTIME, "ORDER BY start"):
            if tid is not None and correlation is not None:
                pid = pid_of(tid)
                first.setdefault((pid, correlation), (pid, tid, correlation, start))
        return _frame(list(first.values()), ("pid", "tid", "correlation", "start_ns"))


def _frame(
    rows: Sequence[tuple[Any, ...]],
    names: Sequence[str],
    text: Sequence[str] = (),
    real: Sequence[str] = (),
) -> pd.DataFrame:
    """Integers as nullable ones: as floats, times since 1970 in ns would lose their last digits."""
    import pandas as pd

    columns = zip(*rows, strict=True) if rows else ((),) * len(names)
    return pd.DataFrame(
        {
            name: pd.Series(
                values, dtype=object if name in text else "Float64" if name in real else "Int64"
            )
            for name, values in zip(names, columns, strict=True)
        }
    )
