"""Gains that are known, by batch, and what the experiment says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.base import ExperimentError, report
from experiments.eager_vs_graph import EXPERIMENT, summary
from harness.judging.cells import compare
from harness.judging.repeats import read
from harness.store import load
from tests.support.made_runs import noisy, write_cell

GPU: dict[str, Any] = {"device": "cuda", "timing": "stamps"}


def write_pairs(run: Path, gains: dict[int, float], first: int = 0) -> None:
    """By batch, eager engines of 100 tok/s, and engines with graphs that are `gain` times better;
    1 % of noise within engines and 0.4 % between them."""
    for place, (batch, gain) in enumerate(gains.items()):
        for eager in (True, False):
            rates = noisy(5, 6, between=0.004, within=0.01, seed=10 * place + eager)
            rates = [[r * (1 if eager else gain) for r in engine] for engine in rates]
            write_cell(run, rates, index=first + 2 * place + eager, batch=batch,
                       enforce_eager=eager, **GPU)  # fmt: skip


def test_gains_and_their_intervals_are_those_of_compare(tmp_path: Path) -> None:
    write_pairs(tmp_path / "run", {1: 1.544})
    frame = summary(load(tmp_path / "run")).set_index("metric")
    assert list(frame.index) == ["output_tok_s", "tpot", "step_us", "step_host_us"]
    assert frame["gain"].to_numpy() == pytest.approx([1.544] * 4, rel=0.01)
    both = read(tmp_path / "run")
    eager = both["requested"].str.contains('"enforce_eager":true')
    sides = [both[eager].copy(), both[~eager].copy()]
    for name, side in zip("ab", sides, strict=True):
        side["run_id"] = name
        side["requested"] = side["requested"].str.replace(
            '"enforce_eager":false', '"enforce_eager":true'
        )
    cells = {c.metric: c.judgement for c in compare(*sides).cells}
    rate, tpot = cells["output_tok_s"], cells["tpot"]
    assert rate.ratio_lo and tpot.ratio and tpot.ratio_hi and tpot.ratio_lo
    assert frame.loc["output_tok_s", "gain_lo"] == pytest.approx(rate.ratio_lo)
    assert frame.loc["tpot", "gain"] == pytest.approx(1 / tpot.ratio)
    assert frame.loc["tpot", "gain_lo"] == pytest.approx(1 / tpot.ratio_hi)
    assert frame.loc["tpot", "gain_hi"] == pytest.approx(1 / tpot.ratio_lo)
    assert set(frame["verdict"]) == {"FASTER"}


@pytest.mark.parametrize(
    ("gains", "holds"),
    [
        ({1: 1.5, 32: 1.1}, True),
        ({1: 1.1, 32: 1.5}, False),
        ({1: 0.8, 32: 0.5}, False),
        ({1: 1.5, 32: 1.5}, None),
        ({1: 1.5}, None),
    ],
)
def test_the_claim_is_a_gain_that_falls_with_the_batch(
    tmp_path: Path, gains: dict[int, float], holds: bool | None
) -> None:
    write_pairs(tmp_path / "run", gains)
    found = EXPERIMENT.verdict(summary(load(tmp_path / "run")))
    assert found.holds is holds, found.text
    low, high = min(gains.values()), max(gains.values())
    numbers = [float(word) for word in found.text.split() if word[0].isdigit() and "." in word]
    lowest, highest = numbers[0], numbers[-1]
    assert (lowest, highest) == pytest.approx((low, high), rel=0.02)


def test_a_pair_that_is_not_whole_says_which_half_is_missing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_cell(run, noisy(5, 6, between=0.004, within=0.01, seed=1), index=0, batch=1, **GPU)
    write_cell(run, [], index=1, batch=1, enforce_eager=False, status="skipped",
               reason="CUDA graphs need a GPU", **GPU)  # fmt: skip
    with pytest.raises(ExperimentError, match=r"\(graph: skipped: CUDA graphs need a GPU\); on a"):
        summary(load(run))
    write_cell(run, noisy(5, 6, between=0.004, within=0.01, seed=1), index=2, batch=2, **GPU)
    write_pairs(run, {4: 2.0}, first=3)
    frame = summary(load(run))
    assert frame[frame["batch"] == 2]["reason"].to_list() == ["graph: not in the run"]
    assert frame[frame["batch"] == 4]["gain"].iloc[0] == pytest.approx(2.0, rel=0.01)


def test_one_engine_a_side_gives_a_gain_without_an_interval_and_a_report(tmp_path: Path) -> None:
    """Between repeats of one engine there is an interval; it is not one over engines."""
    run = tmp_path / "run"
    for place, (batch, eager) in enumerate([(1, True), (1, False), (8, True), (8, False)]):
        rate = 1.0 if eager else 2.0 / batch
        rates = [[r * rate for r in noisy(1, 6, between=0.0, within=0.01, seed=place)[0]]]
        write_cell(run, rates, index=place, batch=batch, enforce_eager=eager, **GPU)
    frame = summary(load(run))
    assert frame[["gain_lo", "gain_hi"]].isna().all(axis=None)
    text = report(EXPERIMENT, run, tmp_path / "out")
    assert "**The claim is undecided**" in text and "; of 1 no interval tells." in text
    one_token = frame.assign(metric="output_tok_s")
    assert EXPERIMENT.verdict(one_token).holds is None


def test_the_report_has_the_literatures_figure_beside_ours(tmp_path: Path) -> None:
    write_pairs(tmp_path / "run", {1: 1.5, 32: 1.1})
    text = report(EXPERIMENT, tmp_path / "run", tmp_path / "out")
    assert "**The claim holds**: graphs make tpot 1.10 to 1.50 times better; 1 of 1 series" in text
    assert "- TPOT 4.20 to 2.72 ms at concurrency 1 (1.544 times better)" in text
    assert np.isclose(4.20 / 2.72, 1.544, atol=1e-3) and np.isclose(9.85 / 9.11, 1.081, atol=1e-3)
    assert (tmp_path / "out" / "eager_vs_graph.png").read_bytes()[:4] == b"\x89PNG"
