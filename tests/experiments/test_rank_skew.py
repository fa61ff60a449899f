"""Delays that are known, and what the experiment makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.stats

from experiments.__main__ import main
from experiments.base import ExperimentError
from experiments.intervals import Interval, mean, slope
from experiments.rank_skew import EXPERIMENT, by_step, holds, summary
from harness.__main__ import main as harness
from harness.store import load
from tests.support.made_tables import COLLECTIVE, FIGURE, STEP, write

SITES = ("embed", "attn.o_proj", "mlp.down_proj", "attn.o_proj", "mlp.down_proj")
DELAYS = (0.0, 50.0, 250.0, 1000.0)


def tables(
    *,
    share: float = 1.0,
    grows: float = 0.0,
    leads: tuple[float, ...] = (0.0,),
    late: int = 1,
    world: int = 2,
    turns: int = 6,
) -> dict[str, list[dict[str, Any]]]:
    """A skew pass: transfer 10 us (+ `grows` a us of delay), the delays come out 1 us longer than
    asked, `share` of which the others wait. Without a delay the others lead by `leads`
    in turn. In the embedding they wait 500 us more, whatever the delay."""
    steps, rows = [], []
    for number in range(turns * len(DELAYS)):
        asked = DELAYS[number % len(DELAYS)]
        taken = asked + 1 if asked else 0.0
        lead = leads[(number // len(DELAYS)) % len(leads)] if asked == 0 else share * taken
        for rank in range(world):
            own = taken if rank == late else 0.0
            steps.append({**STEP, "rank": rank, "pass": "skew", "step": number, "mode": "graph",
                          "skew_asked_us": asked, "skew_us": own})  # fmt: skip
            for ordinal, site in enumerate(SITES):
                transfer = 10.0 + grows * asked
                latency = transfer + (0.0 if rank == late else lead + 500.0 * (site == "embed"))
                low = transfer + min(0.0, lead + 500.0 * (site == "embed"))
                rows.append({**COLLECTIVE, "rank": rank, "pass": "skew", "step": number,
                             "ordinal": ordinal, "site": site, "world": world, "mode": "graph",
                             "latency_us": latency, "transfer_us": low,
                             "wait_us": latency - low})  # fmt: skip
    # Rows that say nothing of it: another pass, a prefill, a step that starved.
    odd = {**rows[0], "wait_us": 1e6, "latency_us": 1e6, "transfer_us": 1e6, "site": SITES[1]}
    rows += [{**odd, "pass": "graph_timed"}, {**odd, "phase": "prefill", "step": 900},
             {**odd, "step": 901, "wait_us": None, "latency_us": None}]  # fmt: skip
    figures = [{**FIGURE, "name": "tick_us", "value": 1.024, "pass": "graph_timed", "ranks": "0"}]
    return {"steps": steps, "collectives": rows, "metrics": figures}


def cell(frame: pd.DataFrame, part: str) -> pd.Series:
    return frame.set_index("part").loc[part]


@pytest.mark.parametrize(("world", "late", "others"), [(2, 1, "0"), (2, 0, "1"), (3, 1, "0,2")])
def test_delays_that_arrive_whole_give_slope_one_and_a_flat_transfer(
    tmp_path: Path, world: int, late: int, others: str
) -> None:
    made = tables(world=world, late=late)
    write(tmp_path / "run", made, tp=world, measure__skew_rank=late)
    frame = summary(load(tmp_path / "run"))
    layers, embed = cell(frame, "layers"), cell(frame, "embed")
    assert layers["slope"] == pytest.approx(1.0, abs=1e-12)
    assert (layers["slope_lo"], layers["slope_hi"]) == pytest.approx((1.0, 1.0), abs=1e-9)
    assert (layers["transfer_us"], layers["transfer_off"]) == (10.0, 0.0)
    assert (layers["wait_0_us"], layers["lead_0_us"], layers["steps"]) == (0.0, 0.0, 24)
    assert layers["waited"] == embed["waited"] == others
    assert layers["tick_us"] == 1.024 and layers["mode"] == "graph"
    assert embed["wait_0_us"] == 500.0, "the ranks meet there"
    assert EXPERIMENT.verdict(frame).holds is True


def test_what_does_not_arrive_or_moves_the_transfer_is_a_miss(tmp_path: Path) -> None:
    write(tmp_path / "run", tables(share=0.9, grows=0.002), tp=2)
    frame = summary(load(tmp_path / "run"))
    row = cell(frame, "layers")
    assert row["slope"] == pytest.approx(0.9)
    assert row["transfer_off"] == pytest.approx(0.2), "12 us instead of 10 under 1000 us"
    found = EXPERIMENT.verdict(frame)
    assert found.holds is False
    assert "missed by graph tp=2 batch=2: slope; graph tp=2 batch=2: transfer" in found.text


def test_the_minimum_over_ranks_makes_waiting_of_jitter_and_the_lead_does_not(
    tmp_path: Path,
) -> None:
    """Leads of +1, -1, 0 in turn: their mean is 0, the mean of what the others wait 1/3."""
    write(tmp_path / "run", tables(leads=(1.0, -1.0, 0.0)), tp=2)
    row = cell(summary(load(tmp_path / "run")), "layers")
    assert row["lead_0_us"] == pytest.approx(0.0, abs=1e-12)
    assert row["wait_0_us"] == pytest.approx(1 / 3)
    half = scipy.stats.t.ppf(0.975, 5) * np.std([1, -1, 0] * 2, ddof=1) / np.sqrt(6)
    assert (row["lead_0_lo"], row["lead_0_hi"]) == pytest.approx((-half, half))
    write(tmp_path / "lead", tables(leads=(3.0, 3.1)), tp=2)
    found = EXPERIMENT.verdict(summary(load(tmp_path / "lead")))
    assert found.holds is False and found.text.endswith("missed by graph tp=2 batch=2: zero")


def test_intervals_that_are_too_wide_decide_nothing(tmp_path: Path) -> None:
    """Leads of +4 and -4 us round a transfer of 10 meet 0, as they would meet 2; transfers that are
    2 us more and 2 us less by turns say no more of its 10 %."""
    made = tables(leads=(4.0, -4.0))
    for row in made["collectives"]:
        turn, delay = divmod(row["step"], len(DELAYS))
        if delay and row["pass"] == "skew":
            row["transfer_us"] += 2.0 if turn % 2 else -2.0
    write(tmp_path / "run", made, tp=2)
    frame = summary(load(tmp_path / "run"))
    row = cell(frame, "layers")
    still, moved = np.array([10.0, 6.0] * 3), np.array([8.0, 12.0] * 3)
    us = scipy.stats.ttest_ind(moved, still, equal_var=False).confidence_interval(0.95)
    off = row["transfer_off"], row["transfer_off_lo"], row["transfer_off_hi"]
    assert off == pytest.approx((0.25, us.low / 8, us.high / 8))
    assert holds(row) == {"slope": True, "transfer": None, "zero": None}
    found = EXPERIMENT.verdict(frame)
    assert found.holds is None and found.text.endswith(
        "intervals too wide to tell: graph tp=2 batch=2: transfer; graph tp=2 batch=2: zero"
    )


def test_points_that_cannot_answer_say_why(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write(run, {}, tp=1)
    write(run, {}, tp=2, index=1, status="oom", reason="no memory")
    with pytest.raises(ExperimentError, match=r"\(oom: no memory\); measure one by python -m harn"):
        summary(load(run))
    still = tables()
    still["steps"] = [s for s in still["steps"] if s["skew_asked_us"]]
    write(run, still, tp=2, batch=4, index=2)
    write(run, tables(), tp=2, batch=8, index=3)
    frame = summary(load(run))
    assert frame[frame["batch"] == 4]["reason"].str.startswith("measure.skew_us needs 0").all()
    assert frame[frame["batch"] == 8]["slope"].notna().all() and len(frame) == 6


def test_a_slope_with_the_sandwich_estimator_hc3() -> None:
    """Against the estimator in matrices: (X'X)^-1 X' diag(e^2 / (1-h)^2) X (X'X)^-1."""
    rng = np.random.default_rng(5)
    x = np.repeat([0.0, 50.0, 250.0, 1000.0], 8)
    y = 3 + 1.02 * x + rng.normal(0, 1 + x / 50)
    found, intercept = slope(x, y)
    design = np.stack([np.ones_like(x), x], axis=1)
    inverse = np.linalg.inv(design.T @ design)
    beta = inverse @ design.T @ y
    hat = np.diag(design @ inverse @ design.T)
    meat = design.T @ np.diag(((y - design @ beta) / (1 - hat)) ** 2) @ design
    error = np.sqrt((inverse @ meat @ inverse)[1, 1])
    assert (intercept, found.value) == pytest.approx(tuple(beta))
    half = scipy.stats.t.ppf(0.975, 30) * error
    assert (found.lo, found.hi) == pytest.approx((beta[1] - half, beta[1] + half))
    with pytest.raises(ValueError, match="two places"):
        slope(np.ones(5), np.arange(5.0))


def test_an_interval_tells_inside_from_outside_from_neither() -> None:
    inside, outside, across = Interval(1, 0.99, 1.01), Interval(2, 1.9, 2.1), Interval(1, 0.9, 1.1)
    assert [i.within(0.95, 1.05) for i in (inside, outside, across)] == [True, False, None]
    assert mean(np.array([2.0])).within(0, 5) is None
    one = scipy.stats.t.interval(0.95, 3, 2.5, scipy.stats.sem([1, 2, 3, 4]))
    assert (mean(np.array([1.0, 2, 3, 4])).lo, mean(np.array([1.0, 2, 3, 4])).hi) == pytest.approx(
        one
    )


def test_live_ranks_join_and_the_one_on_time_waits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two gloo ranks on two of four delays, long enough that no other work on the machine hides
    them: counts, bytes and who waited. How long is for GPUs to say."""
    runs = tmp_path / "runs"
    status = harness(
        ["+experiment=rank_skew", "device=cpu", "model=tiny", "batch=2", "enforce_eager=true",
         "compile=off", f"results_dir={runs}", "workload.prompt_tokens=4",
         "workload.output_tokens=9", "measure.skew_us=[0.0,20000.0]", "measure.skew_rank=0",
         "engine.threads_per_rank=1"]
    )  # fmt: skip
    assert status == 0
    (run,) = runs.iterdir()
    results = load(run)
    rows = results.collectives
    rows = rows[(rows["pass"] == "skew") & (rows["phase"] == "decode")]
    reduces = rows[rows["kind"] == "all_reduce"]
    assert reduces.groupby(["rank", "step"]).size().to_list() == [9] * 16, "2L+1, 8 steps, 2 ranks"
    assert set(reduces["bytes"]) == {2 * 128 * 4}
    steps = by_step(results)
    assert steps.groupby("part").size().to_dict() == {"embed": 8, "layers": 8}
    assert steps["skew_asked_us"].to_list() == [20000.0, 0.0] * 8, "the prefill took a turn"
    frame = summary(results)
    assert "1" in cell(frame, "layers")["waited"].split(","), "others may wait on a busy machine"
    assert main(["rank_skew", str(run)]) == 0
    assert "Measured by others, on other machines:" in capsys.readouterr().out
    assert (run / "report" / "rank_skew.png").read_bytes()[:4] == b"\x89PNG"
