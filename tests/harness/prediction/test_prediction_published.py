"""The prediction's form on the published decode steps of two H200s, with their measured transfers
in the place of calibrated collectives: what it is off by on cells that it has not seen."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from harness.calibration.curves import Curves
from harness.measuring.roofline import Ceilings
from harness.prediction.cells import shape_of
from harness.prediction.model import Cell, Parts, fit, parts_of

FILE = Path(__file__).resolve().parents[3] / "results/published/qwen3-h200x2-2026-11/decode.csv"
CEILINGS = Ceilings(4.45e12, 797e12)  # measured there


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    """CUDA graphs, nothing compiled; `parts` of each step."""
    frame = pd.read_csv(FILE)
    frame = frame[~frame["enforce_eager"] & (frame["compile"] == "off")].reset_index(drop=True)

    def parts(row: pd.Series) -> Parts:
        section = {"name": row["model"], "path": None, "load_format": "dummy"}
        alone = Cell(row["model"], shape_of(section), 1, row["batch"], 128, 128, "bfloat16",
                     None, True)  # fmt: skip
        # Of two ranks each has half; what they repeat (norms) is below 0.1 %.
        one = parts_of(alone, CEILINGS, Curves([]))
        comm = 0.0 if row["tp"] == 1 else row["transfer_us_per_step"]
        shares = (us / row["tp"] for us in (one.weights, one.matmul, one.reading))
        return Parts(*shares, one.layers, comm)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANGEFINDER_CACHE", str(tmp_path_factory.mktemp("models")))
        frame["parts"] = frame.apply(parts, axis=1)
    assert len(frame) == 20
    return frame


@pytest.mark.parametrize(
    ("axis", "left_out", "percent"),
    [
        ("tp", 1, 7.5), ("tp", 2, 8.0), ("model", "qwen3-0.6b", 9.9), ("model", "qwen3-8b", 15.4),
        ("batch", 1, 17.8), ("batch", 8, 6.8), ("batch", 32, 5.1), ("batch", 128, 11.0),
        ("batch", 256, 13.4),
    ],
)  # fmt: skip
def test_mean_error_on_steps_left_out(
    rows: pd.DataFrame, axis: str, left_out: int | str, percent: float
) -> None:
    held = rows[axis] == left_out
    found = fit(list(rows["parts"][~held]), list(rows["step_p50_us"][~held]))
    errors = [
        found.step_us(parts) / us - 1
        for parts, us in zip(rows["parts"][held], rows["step_p50_us"][held], strict=True)
    ]
    assert 100 * np.abs(errors).mean() == pytest.approx(percent, abs=0.3)


def test_what_all_of_them_say(rows: pd.DataFrame) -> None:
    """Reading at 89 % and operations at 71 % of the ceilings, 28 us a layer."""
    found = fit(list(rows["parts"]), list(rows["step_p50_us"]))
    assert 1 / found.read == pytest.approx(0.89, abs=0.01)
    assert 1 / found.matmul == pytest.approx(0.71, abs=0.01)
    assert found.layers == pytest.approx(28.2, abs=0.3)
