"""What the harness does around a measurement: compose the settings, write and read tables."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from harness.__main__ import conf_folder
from harness.settings.config import register
from harness.settings.launcher import compose
from harness.store import load
from harness.tables.point_files import write_point
from tests.support.measuring import Measure

ROWS = 30_000
"""Of collectives: 811 steps of 37."""


def tables(point: str) -> dict[str, dict[str, object]]:
    key = {"run_id": ["r"], "point_id": [point], "process": [0]}
    text = {"pass": "plain", "phase": "decode", "kind": "all_reduce", "site": "mlp.down_proj",
            "dtype": "float32", "mode": "eager", "path": "gloo", "source": "host"}  # fmt: skip
    collectives: dict[str, object] = {name: values * ROWS for name, values in key.items()}
    collectives |= {name: [value] * ROWS for name, value in text.items()}
    collectives |= {name: np.zeros(ROWS, np.int64) for name in ("repeat", "rank", "bytes")}
    collectives |= {"world": np.full(ROWS, 2), "step": np.arange(ROWS) // 37}
    collectives |= {"ordinal": np.arange(ROWS) % 37, "latency_us": np.arange(ROWS) / 8}
    return {"points": {**key, "repeat": [0], "status": ["ok"]}, "collectives": collectives}


def test_store_write(measure: Measure, tmp_path: Path) -> None:
    found = tables("a")
    measure(lambda: write_point(tmp_path / "points" / "a", found))
    read = pd.read_parquet(tmp_path / "points" / "a" / "collectives.parquet")
    assert len(read) == ROWS and read["latency_us"].sum() == ROWS * (ROWS - 1) / 16


def test_store_load(measure: Measure, tmp_path: Path) -> None:
    """Median latency by step of three points: two columns of 90,000 rows."""
    for point in "abc":
        write_point(tmp_path / "points" / point, tables(point))

    def medians() -> pd.Series:
        read = load(tmp_path).table("collectives", ["step", "latency_us"])
        return read.groupby("step")["latency_us"].median()

    found = measure(medians)
    assert found[0] == 18 / 8 and found[2] == (74 + 18) / 8


def test_hydra_composition(measure: Measure) -> None:
    register()
    words = ["+experiment=tp_sweep", "tp=2", "compile=model"]
    points = measure(lambda: compose(words, conf_folder()), rounds=6)
    asked = [(p["tp"], p["batch"], p["enforce_eager"], p["compile"]) for p in points]
    assert asked == [(2, b, eager, "model") for b in (1, 4, 16) for eager in (True, False)]
