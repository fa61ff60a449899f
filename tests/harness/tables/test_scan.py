"""Questions to large tables, answered from the columns and rows that they need, as pandas does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from harness.store import Results, StoreError, load
from harness.tables.point_files import write_point
from tests.support.fake_backend import make_cfg, make_point
from tests.support.made_tables import COLLECTIVE, write

SITES = ("embed", "attn.o_proj", "mlp.down_proj")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four points of three TP sizes and two modes, two engines of one; latencies with nulls."""
    folder = tmp_path_factory.mktemp("runs") / "made"
    draw = np.random.default_rng(3)
    for index, (tp, mode) in enumerate([(1, "eager"), (2, "eager"), (2, "graph"), (4, "graph")]):
        for process in range(2 if index == 1 else 1):
            rows = [
                {**COLLECTIVE, "rank": int(rank), "pass": "backlog", "step": place // 9,
                 "ordinal": place % 9, "phase": str(phase), "site": str(site), "world": tp,
                 "mode": mode, "latency_us": None if latency > 60 else float(latency),
                 "starved": None if place % 3 else bool(place % 2)}
                for place, (rank, phase, site, latency) in enumerate(
                    zip(draw.integers(0, tp, 200), draw.choice(["decode", "prefill"], 200),
                        draw.choice(SITES, 200), draw.lognormal(3, 1, 200), strict=True)
                )
            ]  # fmt: skip
            write(folder, {"collectives": rows}, index=index, process=process, mode=mode, tp=tp)
    return folder


@pytest.fixture
def results(run: Path) -> Results:
    return load(run)


def plain(results: Results) -> pd.DataFrame:
    """All of the table, by pandas, with the settings of the points."""
    files = [pd.read_parquet(path) for path in results.files("collectives")]
    points = pd.concat([pd.read_parquet(path) for path in results.files("points")])
    keys = points[["point_id", "tp", "batch", "model"]].drop_duplicates()
    return pd.concat(files, ignore_index=True).merge(keys, on="point_id")


def same(found: pd.DataFrame, expected: pd.DataFrame) -> None:
    for name in expected:
        a, b = (
            frame[name].astype(object).where(frame[name].notna(), None)
            for frame in (found, expected)
        )
        assert a.tolist() == b.tolist(), name
    assert list(found.columns) == list(expected.columns)


@pytest.mark.parametrize("by", [["site", "tp", "mode"], ["tp"], ["site", "starved"], ["model"], []])
@pytest.mark.parametrize("where", [{}, {"phase": "decode"}, {"tp": [2, 4], "rank": 0}])
def test_quantiles_are_those_of_a_plain_groupby(
    results: Results, by: list[str], where: dict[str, Any]
) -> None:
    frame = plain(results)
    for name, asked in where.items():
        frame = frame[frame[name].isin(asked if isinstance(asked, list) else [asked])]
    found = results.quantiles("collectives", "latency_us", by, q=(0.5, 0.99, 1), where=where)
    assert list(found.columns) == [*by, "n", "p50", "p99", "p100"]
    keys = [frame[name].astype(object).where(frame[name].notna(), "none") for name in by]
    groups = frame["latency_us"].groupby(keys) if by else [((), frame["latency_us"])]
    expected = {key if isinstance(key, tuple) else (key,): values for key, values in groups}
    assert len(found) == len(expected)
    for row in found.itertuples(index=False):
        key = tuple("none" if value is None else value for value in row[: len(by)])
        values = expected[key]
        assert row.n == values.count()
        assert [row.p50, row.p99, row.p100] == pytest.approx(
            values.quantile([0.5, 0.99, 1]).tolist()
        )


def test_the_rows_are_those_of_a_plain_read(results: Results) -> None:
    frame = plain(results)
    columns = ["latency_us", "tp", "site", "starved", "step", "model"]
    same(results.scan("collectives", columns), frame[columns])
    for where, kept in (
        ({"site": "embed"}, frame["site"] == "embed"),
        (
            {"site": ["embed", "lm_head"], "step": [1, 2]},
            (frame["site"] == "embed") & frame["step"].isin([1, 2]),
        ),
        ({"starved": None}, frame["starved"].isna()),
        ({"tp": 4, "mode": "graph"}, frame["tp"] == 4),
        ({"tp": 8}, frame["tp"] == 8),
        ({"site": "nowhere"}, frame["site"] == "nowhere"),
    ):  # fmt: skip
        same(results.scan("collectives", columns, where), frame[kept][columns])


def test_text_is_categorical_and_numbers_are_as_in_a_table(results: Results) -> None:
    found = results.scan("collectives", ["site", "model", "tp", "step", "latency_us"])
    assert {name: str(kind) for name, kind in found.dtypes.items()} == {
        "site": "category", "model": "category", "tp": "Int64", "step": "Int64",
        "latency_us": "float64",
    }  # fmt: skip
    assert found.attrs["units"] == {"latency_us": "us"}
    assert set(found["site"].cat.categories) == set(SITES)
    grouped = found.groupby(["site", "tp"], observed=True)["latency_us"].median()
    medians = results.quantiles("collectives", "latency_us", ["site", "tp"])
    named = {(row.site, row.tp): row.p50 for row in medians.itertuples()}
    assert grouped.to_dict() == pytest.approx(named)


def test_other_columns_and_other_points_are_not_read(
    results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[tuple[str, tuple[str, ...]]] = []
    whole = ds.ParquetFileFormat.make_fragment

    class Spy:
        def __init__(self, path: str, fragment: Any) -> None:
            self.path, self.fragment = path, fragment

        def to_table(self, *, columns: list[str], **more: Any) -> Any:
            read.append((Path(self.path).parent.name, tuple(columns)))
            return self.fragment.to_table(columns=columns, **more)

    class Format(ds.ParquetFileFormat):
        def make_fragment(self, path: str, *args: Any) -> Any:
            return Spy(path, whole(self, path, *args))

    monkeypatch.setattr(ds, "ParquetFileFormat", Format)
    results.quantiles(
        "collectives", "latency_us", ["site", "tp"], where={"tp": 2, "phase": "decode"}
    )
    assert read == [
        (f"{index:012x}-{process}", ("site", "latency_us"))
        for index, process in ((1, 0), (1, 1), (2, 0))
    ]


@pytest.mark.parametrize(
    ("columns", "where", "error", "said"),
    [
        (["latency"], {}, KeyError, "collectives has no column 'latency'"),
        (["latency_us"], {"tpp": 1}, KeyError, "collectives has no column 'tpp'"),
        (["wall_s"], {}, KeyError, "points.wall_s is not one value"),
    ],
)
def test_what_cannot_be_asked(
    tmp_path: Path, columns: list[str], where: dict[str, Any], error: type[Exception], said: str
) -> None:
    point = make_point(make_cfg(), "a" * 12)
    key = {"run_id": ["r"] * 2, "point_id": [point.point_id] * 2, "process": [0] * 2}
    rows = {**key, "repeat": [0, 1], "status": ["ok"] * 2, "wall_s": [1.0, 2.0]}
    write_point(tmp_path / "points" / point.point_id, {"points": rows})
    with pytest.raises(error, match=said):
        load(tmp_path).scan("collectives", columns, where)


def test_what_has_no_quantile(results: Results) -> None:
    with pytest.raises(ValueError, match=r"collectives.site holds string: give numbers"):
        results.quantiles("collectives", "site", ["tp"])
    with pytest.raises(ValueError, match=r"quantile 50: give shares from 0 to 1"):
        results.quantiles("collectives", "latency_us", ["tp"], q=[50])
    with pytest.raises(KeyError, match="table 'collective' was not loaded: choose one of"):
        results.quantiles("collective", "latency_us", ["tp"])
    with pytest.raises(StoreError, match=r"where step='x': the column holds int"):
        results.quantiles("collectives", "latency_us", ["tp"], where={"step": "x"})


def test_no_rows_are_an_empty_table(results: Results) -> None:
    found = results.quantiles("collectives", "latency_us", ["tp"], where={"site": "nowhere"})
    assert found.empty and list(found.columns) == ["tp", "n", "p50"]
    found = results.scan("ranges", ["message", "tp"])
    assert found.empty and list(found.columns) == ["message", "tp"]


def test_damage_and_other_versions_are_named(tmp_path: Path) -> None:
    for index in range(2):
        row = {**COLLECTIVE, "rank": 0, "pass": "host", "step": 0, "ordinal": 0, "site": "embed",
               "world": 2, "mode": "eager", "latency_us": 1.0}  # fmt: skip
        write(tmp_path, {"collectives": [row]}, index=index)
    file = load(tmp_path).files("collectives")[1]
    points = (file.with_name("points.parquet"), file.with_name("points"))
    points[0].rename(points[1])
    with pytest.raises(StoreError, match=r"-0/collectives.parquet: the table of points has no row"):
        load(tmp_path).scan("collectives", ["latency_us"], {"tp": 2})
    points[1].rename(points[0])
    table = pq.read_table(file)
    wanted = ["floor_us", "latency_us"]
    pq.write_table(table.drop_columns(["floor_us"]), file)
    assert load(tmp_path).scan("collectives", wanted)["floor_us"].isna().all(), "came later"
    pq.write_table(table.drop_columns(["rank"]), file)
    with pytest.raises(
        StoreError, match=r"-0/collectives.parquet is damaged \(it has no column rank"
    ):
        load(tmp_path).scan("collectives", ["rank"])
    pq.write_table(table.replace_schema_metadata({"schema_version": "99"}), file)
    with pytest.raises(StoreError, match="schema version 99, this harness reads 1"):
        load(tmp_path).scan("collectives", wanted)
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(StoreError, match=r"collectives.parquet is damaged \(Parquet magic bytes"):
        load(tmp_path).scan("collectives", wanted)
