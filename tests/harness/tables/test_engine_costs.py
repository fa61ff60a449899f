"""Start-up and memory beside each point, from hand-made rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from harness.rows.figures import FigureRows
from harness.rows.tables import columns
from harness.sweep.point import status_only_tables
from harness.tables import report
from harness.tables.point_files import write_point
from tests.support.fake_backend import make_cfg, make_point

GB = 10**9


def write(
    run: Path, index: int, seconds: dict[str, float | None], counts: dict[str, int],
    bytes_of_ranks: list[dict[str, int | None]], process: int = 0, **axes: Any,
) -> None:  # fmt: skip
    point_id = f"{index:012x}"
    point = make_point(make_cfg(**axes), point_id, index)
    tables = dict(status_only_tables(point, "ok", None, run_id=run.name, process=process))
    key = {"run_id": run.name, "point_id": point_id, "process": process, "repeat": 0}
    phases: list[dict[str, Any]] = [
        {"phase": name, "seconds": value, "reason": None if value else "did not happen"}
        for name, value in seconds.items()
    ]
    phases += [{"phase": "capture", "bucket": 1, "seconds": 99.0, "bytes": 5}]
    phases += [{"phase": name, "count": value} for name, value in counts.items()]
    tables["phases"] = columns(
        "phases", [{**key, "cache": "warm", "shared": index > 0, **row} for row in phases]
    )
    tables["memory"] = columns(
        "memory",
        [
            {**key, "rank": rank, "name": name, "bytes": value}
            for rank, of_rank in enumerate(bytes_of_ranks)
            for name, value in of_rank.items()
        ],
    )
    figures = FigureRows({k: key[k] for k in ("run_id", "point_id", "process")})
    figures.summarise("output_tok_s", [100.0], pass_name="plain")
    tables["metrics"] = figures.table()
    write_point(run / "points" / f"{point_id}-{process}", tables)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    compiled = {"total": 90.0, "load": 8.0, "compile": 70.0, "capture": 2.0, "warmup": None}
    eager = {"total": 10.0, "load": 8.0, "compile": None, "capture": None, "warmup": 1.0}
    misses, hits = {"cache_hits": 0, "cache_misses": 2}, {"cache_hits": 0, "cache_misses": 0}
    weights = {"weights_bytes": 2 * GB, "graph_pool_bytes": GB}
    full = [{**weights, "peak_bytes": 5 * GB}, {**weights, "peak_bytes": 7 * GB}]
    more = [{**weights, "peak_bytes": 6 * GB}, {**weights, "peak_bytes": 9 * GB}]
    bare: list[dict[str, int | None]] = [
        {"weights_bytes": 4 * GB, "graph_pool_bytes": None, "peak_bytes": 5 * GB}
    ]
    write(folder, 0, compiled, misses, full, tp=2, batch=1, compile="model", enforce_eager=False)
    write(folder, 1, compiled, misses, more, tp=2, batch=4, compile="model", enforce_eager=False)
    write(folder, 2, eager, hits, bare, tp=1, batch=1)
    write(folder, 2, eager | {"total": 14.0}, hits, bare, tp=1, batch=1, process=1)
    return folder


def test_every_point_has_its_engine_s_start_up_and_memory(run: Path) -> None:
    frame = report.summary(run)
    assert frame["start_total_s"].tolist() == [90.0, 90.0, 12.0]  # median of two fresh engines
    assert frame["start_compile_s"].fillna(-1).tolist() == [70.0, 70.0, -1]
    assert frame["start_capture_s"].fillna(-1).tolist() == [2.0, 2.0, -1]  # not a bucket's
    assert frame["compile_cache"].fillna("").tolist() == ["cold", "cold", ""]
    assert frame["memory_weights_bytes"].tolist() == [2 * GB, 2 * GB, 4 * GB]
    assert frame["memory_peak_bytes"].tolist() == [7 * GB, 9 * GB, 5 * GB]
    assert frame["memory_graph_pool_bytes"].fillna(-1).tolist() == [GB, GB, -1]


def test_engines_are_printed_once_with_their_highest_peak(run: Path) -> None:
    headings, rows = report.engines(report.summary(run))
    assert [heading.replace("\n", " ") for heading in headings] == [
        "tp", "eager", "compile", "compile cache", "start-up s", "load s", "compile s",
        "capture s", "weights GB", "K/V GB", "graphs GB", "peak GB",
    ]  # fmt: skip
    assert rows == [
        ["2", "false", "model", "cold", "90.0", "8.0", "70.0", "2.0", "2.00", "-", "1.00", "9.00"],
        ["1", "true", "off", "-", "12.0", "8.0", "-", "-", "4.00", "-", "-", "5.00"],
    ]


def test_engines_that_found_the_cache_otherwise_are_not_called_part(tmp_path: Path) -> None:
    """cache=warm in an empty folder: the first engine compiles, the others read."""
    run, phases = tmp_path / "run", {"total": 38.0, "compile": 35.0}
    write(run, 0, phases, {"cache_hits": 0, "cache_misses": 2}, [], compile="model")
    for process in (1, 2):
        counts = {"cache_hits": 2, "cache_misses": 0}
        write(run, 0, {"total": 8.0, "compile": 5.0}, counts, [], process, compile="model")
    frame = report.summary(run)
    assert frame["compile_cache"].to_list() == ["cold+warm"]
    assert frame["start_total_s"].to_list() == [8.0]


@pytest.mark.parametrize(
    ("hits", "misses", "state"), [(0, 2, "cold"), (3, 0, "warm"), (1, 2, "part"), (0, 0, None)]
)
def test_what_the_compile_cache_held(
    tmp_path: Path, hits: int, misses: int, state: str | None
) -> None:
    counts = {"cache_hits": hits, "cache_misses": misses}
    write(tmp_path / "run", 0, {"total": 1.0}, counts, [])
    found = report.summary(tmp_path / "run")["compile_cache"].iloc[0]
    assert (None if pd.isna(found) else found) == state
