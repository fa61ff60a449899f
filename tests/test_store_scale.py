"""scripts/store_scale.py on a small store: every way gives the medians of a groupby made here."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "store_scale.py"
POINTS, ROWS = 4, 1500


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("store_scale", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def run(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "made"
    script.make(folder, POINTS, ROWS)
    return folder


def medians(run: Path) -> dict[tuple[Any, ...], tuple[int, float]]:
    """(site, TP, mode) -> (rows, median), point by point in plain Python."""
    values: dict[tuple[Any, ...], list[float]] = {}
    for file in run.glob("points/*/collectives.parquet"):
        tp = pd.read_parquet(file.with_name("points.parquet"))["tp"].iloc[0]
        for row in pd.read_parquet(file).itertuples():
            values.setdefault((row.site, tp, row.mode), []).append(row.latency_us)
    return {key: (len(of), float(pd.Series(of).median())) for key, of in values.items()}


def test_every_way_gives_the_same_medians(script: ModuleType, run: Path) -> None:
    expected = medians(run)
    assert len(expected) == 20 and sum(n for n, _ in expected.values()) == POINTS * ROWS
    for way in ("harness", "few", "one", "whole"):
        found = script.WAYS[way][1](run).values.tolist()
        assert {tuple(row[:3]): tuple(row[3:]) for row in found} == expected, way


def test_the_pruned_question_is_of_its_rows_alone(script: ModuleType, tmp_path: Path) -> None:
    for index in (0, 9):  # TP 2 both, mode eager and graph
        script.write_made(tmp_path, index, ROWS)
    frame = pd.read_parquet(tmp_path / "points" / f"{9:012x}" / "collectives.parquet")
    frame = frame[frame["phase"] == "decode"].groupby("site")["latency_us"].agg(["size", "median"])
    found = script.WAYS["pruned"][1](tmp_path).set_index("site")
    assert found["n"].to_dict() == frame["size"].to_dict()
    assert found["p50"].to_dict() == frame["median"].to_dict()
