"""Predictions of steps that were made by the model itself, so that every number is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from scipy.optimize import least_squares

from engine.shape import ModelShape
from harness.calibration.curves import CalibrationError, Curves
from harness.measuring.roofline import Ceilings
from harness.prediction.cells import Group, shape_of
from harness.prediction.model import Cell, Fit, Parts, PredictionError, fit, parts_of
from harness.prediction.predict import fitted, rows, supported
from tests.support.predictions import CEILINGS, SETTINGS, TRUE, calibrated_rows, comm_us

CURVES = Curves(calibrated_rows())


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelShape]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANGEFINDER_CACHE", str(tmp_path_factory.mktemp("models")))
        return {
            name: shape_of({"name": name, "path": None, "load_format": "dummy"})
            for name in ("qwen3-0.6b", "qwen3-8b", "qwen3-32b")
        }


Make = Callable[..., Cell]


@pytest.fixture
def cell(shapes: dict[str, ModelShape]) -> Make:
    def make(model: str, tp: int, batch: int, noise: float = 0.0) -> Cell:
        """The time that the model with the factors of TRUE gives, times 1 + noise."""
        one = Cell(model, shapes[model], tp, batch, 128, 128, "bfloat16",
                   "nccl" if tp > 1 else None, True)  # fmt: skip
        step_us = TRUE.step_us(parts_of(one, CEILINGS, CURVES))
        return replace(one, step_us=step_us * (1 + noise))

    return make


@pytest.fixture
def group(cell: Make) -> Group:
    cells = [
        cell(model, tp, batch)
        for model in ("qwen3-0.6b", "qwen3-8b")
        for tp in (1, 2)
        for batch in (1, 32, 256, 512)
    ]
    return Group(dict(SETTINGS), cells)


def test_the_terms_of_a_step_by_hand(cell: Make) -> None:
    """8B, batch 32, two ranks: weights 15.14 GB, K/V of 36 layers x 2 x 8 heads x 128 x 2 bytes and
    192 positions on the mean (129 to 255), logits 32 x 151,936 x 2; 73 all-reduces of 256 KiB."""
    one = cell("qwen3-8b", 2, 32)
    found = parts_of(one, CEILINGS, CURVES)
    kv = 32 * 192 * 36 * 2 * 8 * 128 * 2
    logits = 32 * 151_936 * 2
    embedding, norms = 32 * 4096 * 2, 2 * (36 * (2 * 4096 + 2 * 128) + 4096) * 2
    layer = 4096 * 128 * (32 + 16) + 32 * 128 * 4096 + 3 * 4096 * 12_288
    weights = (36 * layer + 151_936 * 4096) * 2
    us = 1e6 / (2 * 4e12)
    assert found.weights == pytest.approx((weights + norms + embedding) * us)
    assert found.reading == pytest.approx((kv + logits) * us)
    flops = 2 * 32 * (36 * layer + 151_936 * 4096)
    assert found.matmul == pytest.approx(flops / (2 * 8e14) * 1e6)
    assert found.layers == 36
    assert found.comm_us == pytest.approx(
        73 * comm_us("all_reduce", 2, 32 * 4096 * 2)
        + comm_us("gather", 2, logits)
        + comm_us("broadcast", 2, 32 * 8)
    )
    assert parts_of(cell("qwen3-8b", 1, 32), CEILINGS, CURVES).comm_us == 0


def test_what_the_model_made_is_recovered(group: Group) -> None:
    found = fitted(group, CEILINGS, CURVES)
    assert found.fit is not None and found.reason is None
    for name in ("read", "matmul", "layers"):
        assert getattr(found.fit, name) == pytest.approx(getattr(TRUE, name), rel=1e-9)
    assert max(map(abs, found.errors)) < 1e-9
    assert [(o.axis, o.value) for o in found.left_out] == [
        ("tp", 1), ("tp", 2), ("model", "qwen3-0.6b"), ("model", "qwen3-8b"),
        ("batch", 1), ("batch", 32), ("batch", 256), ("batch", 512),
    ]  # fmt: skip
    assert all(o.errors and o.largest is not None and o.largest < 1e-9 for o in found.left_out)


def test_what_binds_the_products_is_a_matter_of_the_batch(cell: Make) -> None:
    """1.6 x operations against 1.25 x reading at 4e12 bytes/s and 8e14 operations/s: from 156 rows
    on, whatever the model and the TP size."""
    for model, tp, batch in product(("qwen3-0.6b", "qwen3-8b"), (1, 2), (1, 150, 160, 512)):
        parts = parts_of(cell(model, tp, batch), CEILINGS, CURVES)
        terms = TRUE.terms_us(parts)
        assert (terms["matmul"] > 0) == (batch > 156)
        read = 1.25 * (parts.reading + (0 if batch > 156 else parts.weights))
        assert terms["read"] == pytest.approx(read)
        assert terms["matmul"] == pytest.approx(1.6 * parts.matmul if batch > 156 else 0)


def test_errors_of_cells_left_out_are_those_of_least_squares(cell: Make) -> None:
    rng = np.random.default_rng(5)
    cells = [
        cell(model, tp, batch, rng.normal(0, 0.05))
        for model in ("qwen3-0.6b", "qwen3-8b")
        for tp in (1, 2)
        for batch in (1, 8, 32, 128, 256, 512)
    ]
    found = fitted(Group(dict(SETTINGS), cells), CEILINGS, CURVES)
    parts = [parts_of(c, CEILINGS, CURVES) for c in cells]
    w, m, k, n, comm = np.array([astuple(p) for p in parts]).T
    y = np.array([c.step_us for c in cells])

    def error(f: np.ndarray, of: np.ndarray) -> np.ndarray:
        step = np.maximum(f[0] * w, f[1] * m) + f[0] * k + f[2] * n + comm
        return (step / y - 1)[of]

    assert len(found.left_out) == 2 + 2 + 6
    for out in found.left_out:
        held = np.array([getattr(c, out.axis) == out.value for c in cells])
        rest = fit([p for p, h in zip(parts, held, strict=True) if not h], y[~held].tolist())
        factors = np.array([rest.read, rest.matmul, rest.layers])
        tried = [
            least_squares(error, start, bounds=([1, 1, 0], np.inf), args=(~held,)).cost
            for start in product((1.1, 1.5), (1.01, 2.0, 4.0), (20.0, 60.0))
        ]
        assert np.square(error(factors, ~held)).sum() / 2 <= min(tried) + 1e-9
        wanted = error(factors, held)
        assert out.errors == pytest.approx(wanted.tolist())
        assert out.mean == pytest.approx(np.abs(wanted).mean())
    assert max(map(abs, found.errors)) > 0.01


def test_nothing_is_faster_than_the_ceilings() -> None:
    """Steps that a rate of twice the ceiling would explain: what is left of them costs a layer."""
    parts = [Parts(100.0 * a, 0.1 * a, 10.0 * b, 28.0, 0.0) for a in (1, 2, 3) for b in (1, 2, 3)]
    found = fit(parts, [0.5 * (p.weights + p.reading) + 50 * p.layers for p in parts])
    assert found.read == 1 and found.matmul == 0 and 45 < found.layers < 50
    alone = fit(parts, [1.5 * (p.weights + p.reading) for p in parts])
    assert (alone.read, alone.layers) == (pytest.approx(1.5), pytest.approx(0, abs=1e-9))


def test_operations_that_bind_nothing_have_no_factor(group: Group) -> None:
    """Which of the rates they would be done at cannot be told, and nothing depends on it."""
    few = Group(dict(SETTINGS), [c for c in group.cells if c.batch <= 32])
    found = fitted(few, CEILINGS, CURVES)
    assert found.fit is not None and found.fit.matmul == 0
    assert found.fit.read == pytest.approx(TRUE.read) and max(map(abs, found.errors)) < 1e-9


def test_rows_for_what_was_not_measured(
    group: Group, cell: Make, shapes: dict[str, ModelShape]
) -> None:
    found = rows(
        fitted(group, CEILINGS, CURVES), CEILINGS, CURVES, tps=[4], batches=[8],
        models={"qwen3-32b": shapes["qwen3-32b"]},
    )  # fmt: skip
    by_status: dict[str, list[dict[str, Any]]] = {}
    for row in found:
        by_status.setdefault(row["status"], []).append(row)
    assert set(by_status) == {"ok", "predicted"} and len(by_status["ok"]) == 16
    assert len(by_status["predicted"]) == 3 * 3 * 5 - 16
    for row in by_status["predicted"]:
        wanted = cell(row["model"], row["tp"], row["batch"]).step_us
        assert row["predicted_us"] == pytest.approx(wanted)
        assert row["measured_us"] is None and row["expected_error"] < 1e-9
        terms = [row[f"{name}_us"] for name in ("read", "matmul", "layers", "comm")]
        assert sum(terms) == pytest.approx(row["predicted_us"])
        assert row["decode_tok_s"] == pytest.approx(row["batch"] / row["predicted_us"] * 1e6)
        assert (row["comm_share"] > 0) == (row["tp"] > 1)
    for row in by_status["ok"]:
        assert row["predicted_us"] == pytest.approx(row["measured_us"])
        assert row["error"] == pytest.approx(0, abs=1e-9)


def test_what_nothing_supports_is_refused_by_name(
    group: Group, cell: Make, shapes: dict[str, ModelShape]
) -> None:
    whole = fitted(group, CEILINGS, CURVES)
    supported(whole, cell("qwen3-8b", 4, 8))

    def refusal(found: Any, one: Cell, memory: int | None = None) -> str:
        with pytest.raises(ValueError) as caught:
            supported(found, one, memory)
        return str(caught.value)

    beyond = replace(cell("qwen3-8b", 2, 256), batch=1024)
    assert refusal(whole, beyond) == (
        "batch=1024: measured are 1 to 512; measure further ones"
    )  # fmt: skip
    assert "tp=3" in refusal(whole, replace(cell("qwen3-8b", 2, 8), tp=3))
    assert refusal(whole, cell("qwen3-32b", 1, 8), 60 * 10**9) == (
        "64 GB of weights a GPU, which has 60"
    )
    alone = fitted(
        Group(dict(SETTINGS), [c for c in group.cells if c.model == "qwen3-8b"]), CEILINGS, CURVES
    )
    supported(alone, cell("qwen3-8b", 2, 8))
    assert refusal(alone, cell("qwen3-32b", 2, 8)) == (
        "model=qwen3-32b: measured is qwen3-8b alone, so that no error can be given; measure "
        "another model"
    )
    one_rank = fitted(
        Group(dict(SETTINGS), [c for c in group.cells if c.tp == 1]), CEILINGS, CURVES
    )
    assert "tp=4: measured is 1 alone" in refusal(one_rank, cell("qwen3-8b", 4, 8))
    skipped = rows(one_rank, CEILINGS, CURVES, tps=[4], batches=[], models={})
    assert {(r["tp"], r["status"]) for r in skipped} == {(1, "ok"), (4, "skipped")}
    assert all(r["reason"] for r in skipped if r["status"] == "skipped")


@pytest.mark.parametrize(
    ("chosen", "reason"),
    [
        (lambda c: [c] * (c.batch == 1 and c.tp == 1), "2 cells; 3 terms need at least as many"),
        (
            lambda c: [c] * 3 * (c.batch == 1 and c.tp == 1 and c.model == "qwen3-8b"),
            "cannot tell reading, operations and",
        ),
    ],
)
def test_cells_that_cannot_tell_the_terms_apart(
    group: Group, chosen: Callable[[Cell], list[Cell]], reason: str
) -> None:
    few = Group(dict(SETTINGS), [one for c in group.cells for one in chosen(c)])
    found = fitted(few, CEILINGS, CURVES)
    assert found.fit is None and reason in str(found.reason)
    all_rows = rows(found, CEILINGS, CURVES, tps=[4], batches=[], models={})
    assert {r["status"] for r in all_rows} == {"skipped"}
    with pytest.raises(PredictionError, match=reason):
        supported(found, few.cells[0])


def test_cells_beyond_the_calibration_are_in_no_fit(cell: Make, group: Group) -> None:
    small = Curves(
        [r for r in calibrated_rows() if r["kind"] != "all_reduce" or r["bytes"] <= 65_536]
    )
    with pytest.raises(CalibrationError, match="all_reduce of 262144 bytes"):
        parts_of(cell("qwen3-8b", 2, 32), CEILINGS, small)
    found = fitted(group, CEILINGS, small)
    assert found.fit is not None and found.fit.read == pytest.approx(TRUE.read)
    inside = [c for c in group.cells if c.tp == 1 or c.batch * c.shape.hidden_size <= 32_768]
    assert found.group.cells == inside and len(inside) == 8 + 3 == len(group.cells) - 5
    assert [c for c, _ in found.apart] == [c for c in group.cells if c not in inside]
    assert all("calibrated over nccl are 2048 to 65536" in why for _, why in found.apart)
    none = fitted(Group(dict(SETTINGS), group.cells[4:8]), CEILINGS, Curves([]))
    why = "no graph all_reduce over nccl is calibrated; measure it by "
    said = f"0 cells; 3 terms need at least as many; 4 cells left out of the fit: {why}"
    assert none.fit is None and str(none.reason).startswith(said)


def test_efficiencies_are_the_inverse_of_the_factors() -> None:
    found = Fit(1.25, 2.0, 40.0).terms_us(Parts(1000.0, 200.0, 80.0, 28.0, 300.0))
    assert found == {"read": 1350.0, "matmul": 0.0, "layers": 1120.0, "comm": 300.0}
    found = Fit(1.25, 2.0, 40.0).terms_us(Parts(1000.0, 700.0, 80.0, 28.0, 300.0))
    assert found == {"read": 100.0, "matmul": 1400.0, "layers": 1120.0, "comm": 300.0}
    assert Ceilings(4e12, 8e14) == CEILINGS
