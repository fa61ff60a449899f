"""Small files of the form that `nsys export --type sqlite` writes (2025.3, schema 3.20.3), by hand.

`Export` takes ranges, launches and kernels one by one; `session` makes those of ranks that run
steps, with times that a test chooses. Only columns that a reader could need are there.
"""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from pathlib import Path

TABLES = {
    "StringIds": "id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL",
    "META_DATA_EXPORT": "name TEXT NOT NULL, value TEXT",
    "NVTX_EVENTS": "start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, "
    "rangeId INTEGER, category INTEGER, color INTEGER, text TEXT, globalTid INTEGER, "
    "endGlobalTid INTEGER, textId INTEGER, domainId INTEGER, uint64Value INTEGER, "
    "int64Value INTEGER, doubleValue REAL, uint32Value INTEGER, int32Value INTEGER, "
    "floatValue REAL",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start INTEGER NOT NULL, end INTEGER NOT NULL, "
    "eventClass INTEGER NOT NULL, globalTid INTEGER, correlationId INTEGER, "
    "nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL",
    "CUPTI_ACTIVITY_KIND_KERNEL": "start INTEGER NOT NULL, end INTEGER NOT NULL, "
    "deviceId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER, "
    "globalPid INTEGER, demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL, "
    "graphNodeId INTEGER",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": "start INTEGER NOT NULL, end INTEGER NOT NULL, "
    "deviceId INTEGER NOT NULL, graphId INTEGER NOT NULL, correlationId INTEGER",
}
MACHINE = 1 << 48  # the part of a GlobalId above the process
KERNEL = {
    "all_reduce": "ncclDevKernel_AllReduce_Sum_bf16_RING_LL",
    "gather": "ncclDevKernel_SendRecv",
    "broadcast": "ncclDevKernel_Broadcast_RING_LL",
}
Call = tuple[str, str, int]
"""(kind, site, bytes)"""


def tid_of(pid: int, thread: int = 1) -> int:
    return MACHINE | pid << 24 | pid + thread


class Export:
    """Rows of an export; `write` puts them into a file.

    Args:
        registered: texts stand in StringIds, as registered strings do, else in the row itself.
    """

    def __init__(self, registered: bool = True) -> None:
        self.registered = registered
        self.rows: dict[str, list[tuple[object, ...]]] = {name: [] for name in TABLES}
        self._strings: dict[str, int] = {}
        self._correlations: dict[int, int] = {}
        self.meta(EXPORT_PRODUCT_VERSION="2025.3.2.0", EXPORT_SCHEMA_VERSION="3.20.3")

    def meta(self, **values: str) -> None:
        self.rows["META_DATA_EXPORT"] = list(values.items())

    def string(self, text: str) -> int:
        return self._strings.setdefault(text, 16 + len(self._strings))

    def event(self, kind: int, text: str, tid: int, domain: int, start: int = -1000,
              end: int | None = None, category: int | None = None,
              payload: int | None = None) -> None:  # fmt: skip
        own = kind in (33, 75) or not self.registered  # names of domains are no strings
        self.rows["NVTX_EVENTS"].append(
            (start, end, kind, None, category, None, text if own else None, tid, None,
             None if own else self.string(text), domain, None, payload, None, None, None, None)
        )  # fmt: skip

    def process(self, pid: int, domain: int = 2, name: str = "engine") -> None:
        """Registers a domain with the categories 1 (step), 2 (all_reduce), 3 and 4."""
        self.event(75, name, tid_of(pid), domain)
        for number, category in enumerate(("step", *KERNEL), start=1):
            self.event(33, category, tid_of(pid), domain, category=number)

    def range(self, text: str, pid: int, start: int, end: int | None, payload: int | None = None,
              domain: int = 2) -> None:  # fmt: skip
        kind = text.partition("/")[0]
        category = 1 + ("step", *KERNEL).index(kind) if kind in ("step", *KERNEL) else None
        self.event(59, text, tid_of(pid), domain, start, end, category, payload)

    def launch(self, pid: int, at: int, name: str = "cuLaunchKernelEx", thread: int = 1) -> int:
        """-> the correlation of what it launches."""
        correlation = self._correlations[pid] = self._correlations.get(pid, 0) + 1
        self.rows["CUPTI_ACTIVITY_KIND_RUNTIME"].append(
            (at, at + 3, 1, tid_of(pid, thread), correlation, self.string(name), 0)
        )
        return correlation

    def kernel(self, name: str, pid: int, device: int, start: int, end: int, correlation: int,
               node: int | None = None) -> None:  # fmt: skip
        full = self.string(f"{name}(Args<(unsigned long)4096>)")
        self.rows["CUPTI_ACTIVITY_KIND_KERNEL"].append(
            (start, end, device, 7, correlation, MACHINE | pid << 24, full, self.string(name), node)
        )

    def write(
        self, path: Path, *, without: Collection[str] = (), shuffled: int | None = None
    ) -> Path:
        """Tables without rows are not made, as nsys does; nor those of `without`."""
        self.rows["StringIds"] = [(number, text) for text, number in self._strings.items()]
        path.unlink(missing_ok=True)
        with closing(sqlite3.connect(path)) as database:
            for table, columns in TABLES.items():
                rows = list(self.rows[table])
                if table in without or not rows:
                    continue
                if shuffled is not None:
                    random.Random(shuffled).shuffle(rows)
                database.execute(f"CREATE TABLE {table} ({columns})")
                places = ", ".join("?" * len(rows[0]))
                database.executemany(f"INSERT INTO {table} VALUES ({places})", rows)
            database.commit()
        return path


def session(
    export: Export,
    steps: Sequence[tuple[str, int, Sequence[Call]]],
    kernel_ns: Callable[[int, int, int], int],
    *,
    pids: Sequence[int] = (998, 999),
    step_ns: int = 1_000_000,
) -> Export:
    """Ranks that run steps: rank n is pids[n] on device n. Each collective stands behind a kernel
    `gemm` of 1000 ns that begins 2000 ns before it.

    Args:
        steps: (prefill, decode, mixed, replay, replay-prefill or replay-mixed; batch; collectives).
            Those of a replay are nodes of a graph: no ranges, one launch. Replays that decode share
            a graph where their collectives are the same, and so do the others.
        kernel_ns: (step, ordinal, rank) -> time of the collective's kernel.
    """
    graphs: dict[tuple[bool, tuple[Call, ...]], int] = {}
    for rank, pid in enumerate(pids):
        export.process(pid)
        for number, (what, batch, calls) in enumerate(steps):
            begin = number * step_ns + 100 * rank
            end = begin + 50 + 100 * len(calls)  # of the host, which the device follows later
            export.range(f"step/{what}", pid, begin, end, batch)
            graph = None
            if what.startswith("replay"):
                graph = export.launch(pid, begin + 10, "cudaGraphLaunch")
                own = graphs.setdefault((what == "replay", tuple(calls)), len(graphs))
            for ordinal, (kind, site, size) in enumerate(calls):
                at = begin + 20 + 100 * ordinal
                gemm = call = graph or 0
                if graph is None:
                    gemm = export.launch(pid, at)
                    export.range(f"{kind}/{site}", pid, at + 10, at + 60, size)
                    call = export.launch(pid, at + 30)
                node = None if graph is None else (1 + own << 33) + 2 * ordinal
                runs = number * step_ns + 200_000 + 20_000 * ordinal
                export.kernel("gemm", pid, rank, runs - 2000, runs - 1000, gemm,
                              node and node + 1)  # fmt: skip
                export.kernel(KERNEL[kind], pid, rank, runs,
                              runs + kernel_ns(number, ordinal, rank), call, node)  # fmt: skip
    return export
