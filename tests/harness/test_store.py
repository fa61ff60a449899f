from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from harness.store import StoreError, load
from harness.tables.plain import jsonable
from harness.tables.point_files import to_arrow, write_point


def points(point_id: str, **columns: Any) -> dict[str, Any]:
    row = {"run_id": "r", "point_id": point_id, "process": 0, "repeat": 0, "status": "ok"}
    return {name: [value] for name, value in {**row, **columns}.items()}


def collectives(point_id: str, latency: list[float]) -> dict[str, Any]:
    n = len(latency)
    text = {"run_id": "r", "point_id": point_id, "pass": "host", "phase": "decode",
            "kind": "all_reduce", "site": "embed", "dtype": "float32", "mode": "eager",
            "path": "gloo", "source": "host"}  # fmt: skip
    whole = {"process": 0, "repeat": 0, "rank": 0, "step": 7, "bytes": 2048, "world": 2}
    columns: dict[str, Any] = {name: [value] * n for name, value in text.items()}
    columns |= {name: np.full(n, value) for name, value in whole.items()}
    return {**columns, "ordinal": np.arange(n), "latency_us": np.array(latency)}


def test_values_come_back_and_what_was_left_out_is_null(tmp_path: Path) -> None:
    when = datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=UTC)
    row = points("a", tp=2, enforce_eager=True, rel_noise=0.5, started_at=when, model="tiny")
    write_point(tmp_path / "points" / "a", {"points": row})
    read = load(tmp_path).points.iloc[0]
    assert (read["tp"], read["enforce_eager"], read["rel_noise"]) == (2, True, 0.5)
    assert (read["model"], read["started_at"]) == ("tiny", pd.Timestamp(when))
    assert pd.isna(read["batch"]) and pd.isna(read["reason"]) and pd.isna(read["wall_s"])


def test_nan_is_null_and_infinity_is_refused() -> None:
    table = to_arrow("collectives", collectives("a", [1.5, math.nan]))
    assert table["latency_us"].to_pylist() == [1.5, None]
    with pytest.raises(StoreError, match=r"collectives.latency_us: an infinite value"):
        to_arrow("collectives", collectives("a", [1.5, math.inf]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tpp": [1]}, r"columns \['tpp'\] are not in the catalogue"),
        ({"tp": ["two"]}, r"points.tp holds int64"),
        ({"tp": [1.5]}, r"points.tp holds int64"),
        ({"model": [3]}, r"points.model holds string"),
        ({"status": [None]}, r"points.status: 1 of 1 values are null"),
        ({"tp": [1, 2]}, r"columns of different lengths"),
        ({"status": ["fine"]}, r"status \['fine'\]: choose among ok, pre"),
    ],
)
def test_what_the_catalogue_does_not_allow_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(StoreError, match=message):
        write_point(tmp_path / "points" / "a", {"points": {**points("a"), **change}})
    assert not (tmp_path / "points").exists()


def test_nothing_is_written_unless_every_table_is_right(tmp_path: Path) -> None:
    wrong = {"points": points("a"), "steps": {"run_id": ["r"], "speed": [1]}}
    with pytest.raises(StoreError, match=r"steps: columns \['speed'\]"):
        write_point(tmp_path / "a", wrong)
    assert not (tmp_path / "a").exists()
    with pytest.raises(StoreError, match="needs at least one row"):
        write_point(tmp_path / "a", {"collectives": collectives("a", [1.0])})


def test_one_column_of_many_points_is_read_alone(tmp_path: Path, monkeypatch: Any) -> None:
    for i in range(5):
        tables = {"points": points(f"p{i}"), "collectives": collectives(f"p{i}", [i, i + 0.5])}
        write_point(tmp_path / "points" / f"p{i}", tables)
    write_point(tmp_path / "points" / ".tmp-p9-1", {"points": points("p9")})  # still being written
    asked: list[Any] = []
    read = pq.ParquetFile.read

    def spy(self: Any, columns: Any = None, **more: Any) -> Any:
        asked.append(columns)
        return read(self, columns=columns, **more)

    monkeypatch.setattr(pq.ParquetFile, "read", spy)
    results = load(tmp_path)
    assert asked == []
    frame = results.table("collectives", ["latency_us"])
    assert frame["latency_us"].tolist() == [0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5]
    assert asked == [["latency_us"]] * 5
    assert results.points["point_id"].tolist() == [f"p{i}" for i in range(5)]


def test_a_table_that_no_point_has_is_empty_with_its_columns(tmp_path: Path) -> None:
    write_point(tmp_path / "points" / "a", {"points": points("a")})
    frame = load(tmp_path).table("steps", ["step", "device_us"])
    assert frame.empty and list(frame.columns) == ["step", "device_us"]


def test_files_carry_version_units_and_meanings(tmp_path: Path) -> None:
    write_point(tmp_path / "points" / "a", {"points": points("a")})
    stored = pq.read_schema(tmp_path / "points" / "a" / "points.parquet")
    assert stored.metadata[b"schema"] == b"rangefinder.points"
    assert stored.metadata[b"schema_version"] == b"1"
    assert stored.field("wall_s").metadata[b"unit"] == b"s"
    assert b"measured window" in stored.field("wall_s").metadata[b"meaning"]


def test_another_schema_version_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "points" / "a" / "points.parquet"
    write_point(file.parent, {"points": points("a")})
    table = pq.read_table(file)
    pq.write_table(table.replace_schema_metadata({"schema_version": "99"}), file)
    with pytest.raises(StoreError, match="schema version 99, this harness reads 1"):
        _ = load(tmp_path).points


def test_load_names_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no such run folder"):
        load(tmp_path / "nowhere")
    with pytest.raises(KeyError, match="choose one of points"):
        load(tmp_path, tables=["pionts"])
    with pytest.raises(KeyError, match="was not loaded"):
        load(tmp_path, tables=["points"]).table("steps")


def test_json_has_neither_nan_nor_infinity() -> None:
    value = {"a": math.nan, "b": [math.inf, np.float64(2.5), np.int64(3)], 4: (True, None)}
    assert json.dumps(jsonable(value), allow_nan=False) == (
        '{"a": null, "b": [null, 2.5, 3], "4": [true, null]}'
    )


def test_an_all_null_text_column_stays_text() -> None:
    table = to_arrow("points", points("a", reason=None))
    assert table.schema.field("reason").type == pa.string()
    assert table["reason"].to_pylist() == [None]


def test_a_column_that_came_later_is_null_in_older_files(tmp_path: Path) -> None:
    """One that may not be null makes the file damaged instead."""
    for point in ("old", "new"):
        rows = {
            "run_id": ["r"], "point_id": [point], "process": [0], "repeat": [0], "rank": [0],
            "name": ["kv_bytes"], "bytes": [5], "reason": ["because"],
        }  # fmt: skip
        write_point(tmp_path / "points" / point, {"points": points(point), "memory": rows})
    file = tmp_path / "points" / "old" / "memory.parquet"
    table = pq.read_table(file)
    pq.write_table(table.drop_columns(["reason"]), file)
    frame = load(tmp_path).table("memory", ["reason", "point_id"])
    assert frame.columns.tolist() == ["reason", "point_id"]
    found = dict(zip(frame["point_id"], frame["reason"], strict=True))
    assert found["new"] == "because" and pd.isna(found["old"])
    pq.write_table(table.drop_columns(["rank"]), file)
    with pytest.raises(StoreError, match=r"old/memory\.parquet is damaged"):
        load(tmp_path).table("memory", ["rank"])
