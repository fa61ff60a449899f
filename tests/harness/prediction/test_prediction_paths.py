"""Predictions of runs with several comm paths: whose curves a step is made of, and whose rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine.shape import ModelShape
from harness.calibration.curves import CalibrationError, Curves
from harness.prediction.cells import Group, shape_of
from harness.prediction.model import Cell, parts_of
from harness.prediction.predict import Fitted, fitted, notes, rows
from tests.support.predictions import CEILINGS, SETTINGS, TRUE, calibrated_rows

ALONE = {("all_reduce", "symm_fused"): 5.0, ("all_reduce", "symm_mem"): 9.0,
         ("gather", "nccl"): 20.0, ("broadcast", "nccl"): 7.0}  # fmt: skip
"""us in a graph, launched 100 more; whatever the size."""


def curves() -> Curves:
    """Those of ALONE with two ranks; symm_fused has 2 KiB to 8 MiB."""
    found = [
        {"kind": kind, "path": path, "world": 2, "mode": mode, "bytes": size,
         "transfer_us": us + 100 * (mode == "eager")}
        for (kind, path), us in ALONE.items()
        for mode in ("graph", "eager")
        for size in (8, 2048, (8 if path == "symm_fused" else 1024) << 20)
        if size > 8 or kind == "broadcast"
    ]  # fmt: skip
    return Curves(found)


@pytest.fixture
def shape(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> ModelShape:
    """8B: 36 layers, hidden size 4,096."""
    monkeypatch.setenv("RANGEFINDER_CACHE", str(tmp_path))
    return shape_of({"name": "qwen3-8b", "path": None, "load_format": "dummy"})


def cell(shape: ModelShape, batch: int, path: str | None = "symm_fused", **changes: Any) -> Cell:
    tp = 1 if path is None else 2
    one = Cell("qwen3-8b", shape, tp, batch, 128, 128, "bfloat16", path, True)
    return replace(one, **changes)


@pytest.mark.parametrize(
    ("changes", "comm_us"),
    [
        ({}, 72 * 5 + 9 + 20 + 7),
        ({"batch": 1024}, 72 * 5 + 9 + 20 + 7),
        ({"batch": 1025}, 73 * 9 + 20 + 7),  # more rows than the kernel takes
        ({"batch": 1024, "dtype": "float32"}, 73 * 9 + 20 + 7),  # 16 MiB, of at most 8
        ({"compiled": True}, 73 * 9 + 20 + 7),
        ({"graph": False}, 72 * 105 + 109 + 120 + 107),
    ],
)
def test_whose_curves_a_step_of_fused_sums_is_made_of(
    shape: ModelShape, changes: dict[str, Any], comm_us: float
) -> None:
    one = cell(shape, **{"batch": 32, **changes})
    found = parts_of(one, CEILINGS, curves())
    assert found.comm_us == pytest.approx(comm_us)


def test_a_path_without_a_curve_is_named(shape: ModelShape) -> None:
    rest = Curves(row for row in calibrated_rows() if row["path"] != "symm_fused")
    with pytest.raises(CalibrationError, match="no graph all_reduce over symm_fused is calibrated"):
        parts_of(cell(shape, 32), CEILINGS, rest)


SAID = (
    "no graph all_reduce over symm_fused is calibrated; measure it by python -m harness calibrate "
    "--world 2"
)


@pytest.fixture
def mixed(shape: ModelShape) -> Fitted:
    """Measured with one rank and by nccl, as the model says, and at batch 32 by symm_fused, of
    which nothing is calibrated."""
    found = Curves(calibrated_rows())
    cells = [
        replace(one, step_us=TRUE.step_us(parts_of(one, CEILINGS, found)))
        for path in (None, "nccl")
        for batch in (1, 32, 256, 512)
        for one in [cell(shape, batch, path)]
    ]
    cells.insert(1, cell(shape, 32, step_us=777.0))
    return fitted(Group(dict(SETTINGS), cells), CEILINGS, found)


def test_a_path_that_is_not_calibrated_is_left_out_and_the_rest_fitted(mixed: Fitted) -> None:
    assert mixed.fit is not None and mixed.fit.read == pytest.approx(TRUE.read)
    assert [c.path for c in mixed.group.cells] == [None] * 4 + ["nccl"] * 4
    assert len(mixed.errors) == 8 and max(map(abs, mixed.errors)) < 1e-9
    assert [(c.path, c.batch, why) for c, why in mixed.apart] == [("symm_fused", 32, SAID)]
    assert notes([*mixed.apart, *mixed.apart, (mixed.group.cells[0], "else")]) == [
        f"2 cells left out of the fit: {SAID}", "1 cells left out of the fit: else",
    ]  # fmt: skip


def test_rows_say_by_which_path(mixed: Fitted) -> None:
    found = rows(mixed, CEILINGS, Curves(calibrated_rows()), tps=[], batches=[8], models={})
    by = {(r["tp"], r["comm"], r["batch"]): r for r in found}
    assert len(by) == len(found)
    status = {key: row["status"] for key, row in by.items()}
    batches = (1, 8, 32, 256, 512)
    assert status == {
        **{(1, "solo", n): "predicted" if n == 8 else "ok" for n in batches},
        **{(2, "nccl", n): "predicted" if n == 8 else "ok" for n in batches},
        **{(2, "symm_fused", n): "skipped" for n in batches},
    }
    measured = by.pop((2, "symm_fused", 32))
    assert (measured["measured_us"], measured["reason"]) == (777.0, SAID)
    assert {row["reason"] for key, row in by.items() if key[1] == "symm_fused"} == {
        f"no cell by comm=symm_fused is in the fit: {SAID}"
    }
    assert by[2, "nccl", 8]["predicted_us"] > by[2, "nccl", 8]["comm_us"] > 0


def test_both_paths_of_a_combination_are_predicted(shape: ModelShape) -> None:
    """By symm_fused all but batch 256 is measured, by symm_mem batch 1 alone."""
    known = Curves([*calibrated_rows(), *(
        {**row, "path": path, "transfer_us": row["transfer_us"] * factor}
        for path, factor in (("symm_mem", 0.8), ("symm_fused", 0.5))
        for row in calibrated_rows()
        if row["bytes"] <= 8 << 20 or path == "symm_mem"
    )])  # fmt: skip
    cells = [
        replace(one, step_us=TRUE.step_us(parts_of(one, CEILINGS, known)))
        for path, batches in ((None, (1, 32, 256)), ("symm_fused", (1, 32)), ("symm_mem", (1,)))
        for batch in batches
        for one in [cell(shape, batch, path)]
    ]
    whole = fitted(Group(dict(SETTINGS), cells), CEILINGS, known)
    assert whole.apart == ()
    found = rows(whole, CEILINGS, known, tps=[], batches=[], models={})
    predicted = {(r["comm"], r["batch"]): r for r in found if r["status"] == "predicted"}
    assert set(predicted) == {("symm_fused", 256), ("symm_mem", 32), ("symm_mem", 256)}
    for (path, batch), row in predicted.items():
        wanted = parts_of(cell(shape, batch, path), CEILINGS, known)
        assert row["comm_us"] == pytest.approx(wanted.comm_us)
        assert row["predicted_us"] == pytest.approx(TRUE.step_us(wanted))
    assert predicted["symm_fused", 256]["comm_us"] < predicted["symm_mem", 256]["comm_us"]
