"""Scaling efficiency: what a point is divided by, and what its reason names where there is none"""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.tables import report
from harness.tables.scaling import scaling_efficiency
from tests.support.made_runs import write_cell
from tests.support.plans import plan, sweep


def row(tp: int, rate: float | None = 100.0, status: str = "ok", **settings: object) -> dict:
    asked = {"tp": tp, "workload.arrivals": "all", **settings}
    return {"status": status, "output_tok_s": rate, "tp": tp, "settings": asked}


NONE = "no point of tp=1 with these settings is ok (nearest: "
CASES = [
    ([row(1), row(2, 150.0, comm="gloo")], (0.75, None)),
    ([row(1, batch=1), row(1, batch=8), row(2, batch=4)], (None, f"{NONE}batch=1, not 4)")),
    (
        [row(1, batch=1, seed=1), row(1, batch=1, seed=0, page=16), row(2, batch=4, seed=0)],
        (None, f"{NONE}batch=1, not 4 and seed=1, not 0)"),
    ),
    (
        [row(1, a=1, b=True, c=1, d=1), row(2, a=2, b=None, c=2, d=2)],
        (None, f"{NONE}it differs in a, b, c, d)"),
    ),
    ([row(1, b=True), row(2, b=None)], (None, f"{NONE}b=true, not null)")),
    (
        [row(1, None, "oom"), row(1, batch=8), row(2)],
        (None, "the point of tp=1 with these settings is oom"),
    ),
    ([row(1, None, "oom", batch=8), row(2)], (None, "no point of tp=1 is ok")),
    ([row(4), row(2)], (None, "there is no point of tp=1")),
]


@pytest.mark.parametrize(("rows", "last"), CASES)
def test_the_reason_names_what_differs(rows: list[dict], last: tuple[float | None, str]) -> None:
    assert scaling_efficiency(rows)[-1] == last


def test_the_reason_stands_below_the_table(tmp_path: Path) -> None:
    write_cell(tmp_path / "run", [[100.0]], index=0, tp=1, batch=1)
    for index, batch in enumerate((1, 4, 8)):
        write_cell(tmp_path / "run", [[150.0]], index=1 + index, tp=2, batch=batch)
    assert report.remarks(report.summary(tmp_path / "run")) == [
        f"no scaling efficiency at tp=2 (1 point): {NONE}batch=1, not {batch})" for batch in (4, 8)
    ]


def test_a_rule_of_one_tp_size_takes_no_efficiency_from_the_others() -> None:
    """A limit that nobody gave must not tell tp=2 from the tp=1 that it is divided by."""
    rule = {"when": {"tp": 2, "batch": ">=8"}, "reason": "two cores"}
    for axes in ({"tp": [1, 2], "batch": [1, 8]}, {"batch": [8, 1], "tp": [2, 1]}):
        points = plan(sweep({"skip": [rule]}, **axes)).points
        assert {p.cfg["engine"]["max_num_seqs"] for p in points} == {8}
    fast = {"when": {"enforce_eager": False, "batch": 8}, "reason": "out of memory"}
    points = plan(sweep({"skip": [fast]}, tp=[1, 2], batch=[1, 8], enforce_eager=[True, False]))
    limits = {(p.axes["enforce_eager"], p.cfg["engine"]["max_num_seqs"]) for p in points.points}
    assert limits == {(True, 8), (False, 1)}, "an engine is not made for a batch it never runs"
