"""What every report shares: whole numbers, ranges, and labels that tell rows apart."""

from __future__ import annotations

import pandas as pd

from experiments.base import Column, between, framed, labels, lines, table

COLUMNS = {
    "mode": Column("how"),
    "rank": Column("whose"),
    "engines": Column("fresh ones"),
    "us": Column("a time", ".1f"),
}
SETTINGS = ("tp", "batch", "enforce_eager", "model", "seqs")
ROWS = [
    {"tp": 2, "batch": 4, "enforce_eager": True, "model": "a", "seqs": None, "mode": "eager",
     "rank": 0, "engines": 2, "us": 1.0},
    {"tp": 2, "batch": 4, "enforce_eager": False, "model": "a", "seqs": 8, "mode": "graph",
     "rank": 1, "engines": None, "us": None},
    {"tp": 2, "batch": 4, "enforce_eager": False, "model": "a", "seqs": 256, "mode": "graph",
     "rank": 1, "engines": 5, "us": 2.0},
]  # fmt: skip


def test_counts_beside_missing_ones_stay_whole() -> None:
    kept = framed(ROWS, SETTINGS, COLUMNS)
    assert table(kept, COLUMNS).splitlines()[2:] == [
        "| 2 | 4 | true | a | - | eager | 0 | 2 | 1.0 |",
        "| 2 | 4 | false | a | 8 | graph | 1 | - | - |",
        "| 2 | 4 | false | a | 256 | graph | 1 | 5 | 2.0 |",
    ]
    assert kept["us"].dtype == "float64" and kept["seqs"].sum() == 264
    assert kept.to_csv(index=False).splitlines()[2] == "2,4,False,a,8,graph,1,,"
    halves = framed([{"temperature": 0.5}, {"temperature": 1.0}], ["temperature"], {})
    assert halves["temperature"].to_list() == [0.5, 1.0]


def test_figures_are_numbers_also_where_all_are_missing() -> None:
    """None - 1.0 is an error, None < 1.0 too: reports of runs without an interval ended in both."""
    frame = framed([{"us": None}, {}], [], COLUMNS)
    assert frame["us"].dtype == "float64" and (frame["us"] - 1.0).isna().all()
    assert table(frame, COLUMNS).splitlines()[2:] == ["| - | - | - | - |"] * 2


def test_labels_name_whatever_tells_rows_apart() -> None:
    frame = framed(ROWS, SETTINGS, COLUMNS)
    assert labels(frame, COLUMNS) == [
        "eager tp=2 batch=4 seqs=null", "graph tp=2 batch=4 seqs=8", "graph tp=2 batch=4 seqs=256"
    ]  # fmt: skip
    alike = frame[frame["mode"] == "graph"].drop(columns="mode")
    assert labels(alike, COLUMNS, ("rank", "engines")) == [
        "tp=2 batch=4 seqs=8 engines=null", "tp=2 batch=4 seqs=256 engines=5"
    ]  # fmt: skip


def test_a_range_of_one_value_is_said_once() -> None:
    assert between(pd.Series([1.0, None, 3.0]), ".1f") == "1.0 to 3.0"
    assert between(pd.Series([1.01, 0.99]), ".1f") == "1.0"
    assert between(pd.Series([None, None], dtype=float), ".1f") == "-"


def test_bars_keep_their_place_beside_long_names() -> None:
    """In 9 inches a model, two lengths and a mode left the bars 2 of them, and the axis was cut."""
    name = "graph+compiled-model tp=2 batch=256 model=qwen3-0.6b workload.prompt_tokens=2048 rank=1"
    drawing, (ax,) = lines([name] * 40)
    ax.barh(range(40), [100.0] * 40)
    drawing.draw_without_rendering()
    inches = ax.get_position().width * drawing.get_figwidth()
    assert 4 < inches < 7, inches
    assert [text.get_text() for text in ax.get_yticklabels()] == [name] * 40
    first, last = ax.get_ylim()[1], ax.get_ylim()[0]
    assert (first, last) == (-0.6, 39.6), "the first on top"
