"""Four ways of running whose gains are known, and the interaction with its interval."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats

from experiments.base import ExperimentError, report
from experiments.compile_x_graph import EXPERIMENT, effects, summary
from experiments.intervals import product
from harness.store import load
from tests.support.made_runs import noisy, write_cell

GPU: dict[str, Any] = {"device": "cuda", "timing": "stamps"}
WAYS = [("off", True), ("model", True), ("off", False), ("model", False)]


def write_four(run: Path, gains: tuple[float, float, float], *, engines: int = 5) -> None:
    """By compiling alone, by graphs alone, by both."""
    for place, ((how, eager), gain) in enumerate(zip(WAYS, (1.0, *gains), strict=True)):
        rates = noisy(engines, 6, between=0.004, within=0.01, seed=place)
        write_cell(run, [[r * gain for r in e] for e in rates], index=place, compile=how,
                   enforce_eager=eager, **GPU)  # fmt: skip


@pytest.mark.parametrize(
    ("gains", "interaction", "holds"),
    [((1.5, 4.0, 4.5), 0.75, True), ((1.5, 2.0, 3.0), 1.0, None), ((1.5, 2.0, 4.5), 1.5, False)],
)
def test_the_interaction_is_the_ratio_of_ratios(
    tmp_path: Path, gains: tuple[float, float, float], interaction: float, holds: bool | None
) -> None:
    write_four(tmp_path / "run", gains)
    frame = summary(load(tmp_path / "run"))
    assert frame["metric"].to_list() == ["output_tok_s", "tpot", "step_us"]
    assert set(frame["compiled"]) == {"model"} and "compile" not in frame
    for _, row in frame.iterrows():
        found = [row[name] for name in ("by_compile", "by_graph", "by_both")]
        assert found == pytest.approx(gains, rel=0.015), "times are turned into speeds"
        assert row["interaction"] == pytest.approx(interaction, rel=0.02)
        assert row["interaction_lo"] < row["interaction"] < row["interaction_hi"]
        assert row["adds"] == pytest.approx(gains[2] / gains[1], rel=0.02)
    assert EXPERIMENT.verdict(frame).holds is holds


def test_intervals_against_a_contrast_worked_by_hand() -> None:
    """Two factors: Welch's interval of scipy; four: the sum of four variances of a mean."""
    rng = np.random.default_rng(3)
    logs = [
        rng.normal(mean, std, 5) for mean, std in ((0, 0.01), (1, 0.02), (2, 0.03), (2.5, 0.01))
    ]
    cells = [[(float(v),) for v in np.exp(own)] for own in logs]
    two = product([(1, cells[1]), (-1, cells[0])])
    welch = scipy.stats.ttest_ind(logs[1], logs[0], equal_var=False).confidence_interval(0.95)
    assert (two.lo, two.hi) == pytest.approx(tuple(np.exp([welch.low, welch.high])))
    row = effects(*cells)
    value = logs[3].mean() + logs[0].mean() - logs[1].mean() - logs[2].mean()
    each = [own.var(ddof=1) / 5 for own in logs]
    df = sum(each) ** 2 / sum(v**2 / 4 for v in each)
    half = scipy.stats.t.ppf(0.975, df) * np.sqrt(sum(each))
    assert row["interaction"] == pytest.approx(np.exp(value))
    found = row["interaction_lo"], row["interaction_hi"]
    assert found == pytest.approx((np.exp(value - half), np.exp(value + half)))


def test_an_engine_counts_once_however_many_repeats_it_has() -> None:
    many = [(1.0, 1.0, 1.0, 9.0, 1.0), (2.0, 2.0, 0.1)]
    few = [(1.0,), (2.0,)]
    assert product([(1, many)]) == product([(1, few)])


def test_without_an_interval_the_row_says_why(tmp_path: Path) -> None:
    write_four(tmp_path / "run", (1.5, 2.0, 2.5), engines=1)
    frame = summary(load(tmp_path / "run"))
    assert frame["interaction"].to_numpy() == pytest.approx([2.5 / 3] * 3, rel=0.05)
    assert frame["interaction_lo"].isna().all()
    assert frame["reason"].str.startswith("one engine: how far engines differ").all()
    assert EXPERIMENT.verdict(frame).holds is None


def test_three_of_four_are_no_answer(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for place, (how, eager) in enumerate(WAYS[:3]):
        write_cell(run, noisy(5, 6, between=0.01, within=0.01, seed=1), index=place, compile=how,
                   enforce_eager=eager, **GPU)  # fmt: skip
    with pytest.raises(ExperimentError, match=r"all four ways \(compiled graph: not in the run\)"):
        summary(load(run))


def test_the_report_shows_a_square(tmp_path: Path) -> None:
    write_four(tmp_path / "run", (1.5, 4.0, 4.5))
    text = report(EXPERIMENT, tmp_path / "run", tmp_path / "out")
    assert "**The claim holds**: of tpot, compiling alone gains 1.5" in text
    assert "below 1 in 1 of 1 cells" in text and "(torchtitan#2373)" in text
    assert (tmp_path / "out" / "compile_x_graph.png").read_bytes()[:4] == b"\x89PNG"
