"""Cells asked for alike whose engines did not run alike: `compare` says in what."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from harness.judging.cells import compare
from harness.judging.compare import csv, markdown, to_json
from harness.judging.differences import effective, of_one_side
from harness.judging.repeats import COLUMNS, read
from harness.judging.repeats import csv as repeats_csv
from tests.support.made_runs import noisy, write_cell

RATES = noisy(5, 2, between=0.005, within=0.01, seed=0)
SLOWER = noisy(5, 2, between=0.005, within=0.01, seed=1, centre=90)
RAN: dict[str, Any] = {
    "attention": "flash2", "comm": "nccl", "mode": "graph", "page_size": 256, "overlap": True,
    "max_model_len": None, "num_pages": 4000, "cache_dir": "/tmp/engine-1",
}  # fmt: skip
LATER: dict[str, Any] = RAN | {"attention": "flash2_triton", "page_size": 64}
SAID = ("attention: flash2 in A, flash2_triton in B", "page_size: 256 in A, 64 in B")


def side(*ran: dict[str, Any] | None, status: str = "ok") -> pd.DataFrame:
    """A row an engine."""
    texts = [None if one is None else json.dumps(one) for one in ran]
    return pd.DataFrame({"effective": texts, "status": status})


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        (side(RAN), side(RAN, RAN), ()),
        (side(RAN), side(LATER), SAID),
        (side(RAN), side(RAN | {"num_pages": 3990, "cache_dir": "/tmp/engine-2"}), ()),
        (side(RAN), side(RAN | {"overlap": False}), ("overlap: true in A, false in B",)),
        (side(RAN), side(RAN | {"fused": "store"}), ("fused: not known in A, store in B",)),
        (side(RAN | {"max_model_len": 1}), side(RAN), ("max_model_len: 1 in A, null in B",)),
        (side(RAN), side(RAN, LATER | {"page_size": 256}),
         ("attention: flash2 in A, flash2 and flash2_triton in B",)),
        (side(None, RAN), side(RAN), ()),
        (side(None), side(RAN), ("settings: not known in A",)),
        (side(None), side(None, None), ("settings: not known in A and B",)),
        (side(RAN), side(None, status="error"), ()),
        (side(None), side(None, status="skipped"), ("settings: not known in A",)),
    ],
)  # fmt: skip
def test_what_the_engines_read_back_otherwise(
    a: pd.DataFrame, b: pd.DataFrame, said: tuple[str, ...]
) -> None:
    assert effective(a, b) == said
    assert effective(b, a) == tuple(_turned(text) for text in said)


def _turned(text: str) -> str:
    """The same of B and A."""
    name, _, values = text.partition(": ")
    if name == "settings":
        return text if "and" in values else text[:-1] + "AB"[text[-1] == "A"]
    in_a, in_b = values.split(", ")
    return f"{name}: {in_b.removesuffix(' in B')} in A, {in_a.removesuffix(' in A')} in B"


def test_a_setting_of_one_side_is_told_whichever_side_is_older() -> None:
    """Both of a setting that came and of one that went, and nothing of how a point is measured."""
    old = {"tp": 1, "engine": {"launch": False}, "measure": {"gone": 1}}
    new = {"tp": 1, "engine": {"fused": "auto"}, "measure": {"name": "quick"}}
    frames = [pd.DataFrame({"requested": [json.dumps(one)] * 2}) for one in (old, new)]
    assert list(of_one_side(*frames, ("measure",))) == [
        "engine.fused: no such setting in A, auto in B",
        "engine.launch: false in A, no such setting in B",
    ]
    assert list(of_one_side(*reversed(frames), ("measure",))) == [
        "engine.fused: auto in A, no such setting in B",
        "engine.launch: no such setting in A, false in B",
    ]


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """Two cells at tp=2 that run otherwise in B, and one at tp=1 that does not."""
    a, b = tmp_path / "run-a", tmp_path / "run-b"
    for index, (tp, batch) in enumerate(((2, 1), (2, 8), (1, 1))):
        write_cell(a, RATES, index=index, tp=tp, batch=batch, effective=RAN)
        ran = LATER if tp == 2 else RAN
        write_cell(b, SLOWER, index=index, tp=tp, batch=batch, effective=ran)
    return a, b


def test_a_comparison_stays_and_says_what_ran(runs: tuple[Path, Path]) -> None:
    found = compare(*map(read, runs), metrics=["tpot"])
    assert found.counts()["SLOWER"] == 3, "the same was asked for, so it is judged"
    assert [cell.effective for cell in found.cells] == [SAID, SAID, ()]
    assert found.notes == tuple(f"2 cells: effective {text}" for text in SAID)
    assert f"\n\n2 cells: effective {SAID[0]}\n\n2 cells: effective {SAID[1]}\n\n" in (
        markdown(found) + "\n"
    )
    whole = json.loads(to_json(found))
    assert whole["notes"] == list(found.notes)
    assert [cell["effective"] for cell in whole["cells"]] == ["; ".join(SAID)] * 2 + [""]
    assert csv(found).splitlines()[1].count('"attention: flash2 in A, flash2_triton in B; ') == 1


def test_repeats_that_were_published_say_it_and_older_ones_that_they_do_not(
    runs: tuple[Path, Path], tmp_path: Path
) -> None:
    a, b = runs
    file = tmp_path / "repeats.csv"
    file.write_text(repeats_csv(a), encoding="utf-8")
    notes = compare(read(a), read(b), ["tpot"]).notes
    assert compare(read(file), read(b), ["tpot"]).notes == notes
    pd.read_csv(file).drop(columns="effective").to_csv(file, index=False)
    old = read(file)
    assert list(old.columns) == COLUMNS and old["effective"].isna().all()
    found = compare(old, read(b), ["tpot"])
    assert found.notes == ("3 cells: effective settings: not known in A",)
    assert found.counts()["SLOWER"] == 3
