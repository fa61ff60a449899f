"""Verdicts on made-up repeats: the rules one by one, and how often they are right."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import scipy.stats

from harness.judging.verdict import Judgement, Repeats, Verdict, engine_floor, judge
from tests.support.made_runs import Engines, noisy


def side(engines: Engines, unit: str = "s") -> Repeats:
    return Repeats(tuple(map(tuple, engines)), unit)


def judged(a: Engines, b: Engines, **more: Any) -> Judgement:
    return judge(side(a), side(b), "lower", **more)


STEADY = noisy(5, 6, between=0.005, within=0.01, seed=0)
SLOWER = noisy(5, 6, between=0.005, within=0.01, seed=1, centre=110)


def test_a_slow_down_is_slower_for_times_and_faster_for_rates() -> None:
    found = judged(STEADY, SLOWER)
    assert found.verdict == Verdict.SLOWER
    assert found.a and found.b and found.ratio and found.floor
    assert found.a.hi < found.b.lo and found.ratio - 1 > found.floor
    assert (found.a.n, found.a.n_process) == (30, 5)
    assert judge(side(STEADY), side(SLOWER), "higher").verdict == Verdict.FASTER
    back = judged(SLOWER, STEADY)
    assert back.verdict == Verdict.FASTER
    assert back.ratio == pytest.approx(1 / found.ratio)
    assert back.ratio_lo == pytest.approx(1 / found.ratio_hi)  # type: ignore[operator]
    assert back.floor == pytest.approx(found.floor)


def test_numbers_are_those_of_scipy_on_logarithms_of_the_engines_medians() -> None:
    found = judged(STEADY, SLOWER)
    a, b = (np.log(np.median(s, axis=1)) for s in (STEADY, SLOWER))
    lo, hi = scipy.stats.t.interval(0.99, 4, loc=a.mean(), scale=scipy.stats.sem(a))
    assert found.a is not None
    assert np.log([found.a.lo, found.a.value, found.a.hi]) == pytest.approx([lo, a.mean(), hi])
    welch = scipy.stats.ttest_ind(b, a, equal_var=False).confidence_interval(0.95)
    assert np.log([found.ratio_lo, found.ratio_hi]) == pytest.approx([welch.low, welch.high])
    pooled = math.sqrt((a.var(ddof=1) + b.var(ddof=1)) / 2)
    floor = scipy.stats.t.ppf(0.975, 8) * math.sqrt(2) * pooled
    assert found.floor == pytest.approx(math.expm1(floor))
    assert engine_floor([STEADY, SLOWER]) == pytest.approx(found.floor)


def test_a_difference_inside_the_floor_is_the_same() -> None:
    found = judged(STEADY, noisy(5, 6, between=0.005, within=0.01, seed=2))
    assert found.verdict == Verdict.SAME
    assert found.floor and found.ratio_lo and found.ratio_hi
    assert 1 / (1 + found.floor) < found.ratio_lo < found.ratio_hi < 1 + found.floor


def spread(engines: int, centre: float) -> Engines:
    """Engines whose logarithms are evenly spaced and have a standard deviation of 1 %."""
    places = np.linspace(-1, 1, engines)
    logs = np.log(centre) + 0.01 * places / places.std(ddof=1)
    return [[float(np.exp(log))] * 6 for log in logs]


@pytest.mark.parametrize(("engines", "ratio", "verdict"), [
    (12, 1.025, "AMBIGUOUS"), (12, 1.02, "SAME"), (12, 1.035, "SLOWER"),
    (8, 1.015, "SAME"), (8, 1.024, "AMBIGUOUS"), (8, 1.03, "AMBIGUOUS"),
])  # fmt: skip
def test_a_gap_below_the_floor_is_no_claim(engines: int, ratio: float, verdict: str) -> None:
    """By tables of t: with twelve engines a side the floor is 2.98 %, a gap needs 1.81 %, and the
    ratio's interval is 0.85 % wide either way; with eight 3.08 %, 2.51 % and 1.08 %."""
    found = judged(spread(engines, 1.0), spread(engines, ratio))
    assert found.floor == pytest.approx({12: 0.0298, 8: 0.0308}[engines], abs=1e-4)
    assert found.verdict == verdict
    apart = ratio > {12: 1.0181, 8: 1.0251}[engines]
    assert ("intervals are apart" in found.reason or "intervals apart" in found.reason) == apart
    assert ("is within the floor" in found.reason) == (verdict == "AMBIGUOUS" and apart)


def test_a_floor_that_is_given_takes_the_place_of_that_in_the_data() -> None:
    a, b = (
        noisy(40, 5, between=0.02, within=0.001, seed=s, centre=c) for s, c in ((0, 1), (1, 1.04))
    )
    assert judged(a, b).verdict == Verdict.SAME
    found = judged(a, b, floor=0.01)
    assert (found.verdict, found.floor) == (Verdict.SLOWER, 0.01)


def test_a_floor_that_hides_everything_gives_no_same() -> None:
    wild = [noisy(6, 6, between=0.2, within=0.1, seed=s) for s in (0, 1)]
    found = judged(*wild)
    assert found.verdict == Verdict.AMBIGUOUS
    assert found.reason.startswith("too noisy: two engines alike differ by up to ")
    assert judged(*wild, floor=5.0).verdict == Verdict.SAME, "whoever gives a floor means it"


def test_an_effect_within_wide_intervals_is_ambiguous() -> None:
    a = [[1.0] * 3, [1.01] * 3]
    found = judged(a, [[1.2] * 3, [1.21] * 3])
    assert found.verdict == Verdict.AMBIGUOUS
    assert found.reason.startswith("99 % intervals overlap, and 19.9% is above the floor")


@pytest.mark.parametrize("few", [[[1.0, 1.1, 1.2, 1.3]], [[1.0, 1.1], [1.2, 1.3]], [[1.0] * 4]])
def test_four_repeats_decide_nothing(few: Engines) -> None:
    found = judged(STEADY, few, floor=0.001)
    assert found.verdict == Verdict.AMBIGUOUS
    assert found.reason == "B has 4 repeats; a verdict needs 5"
    both = judged([[2.0]], few)
    assert both.reason == "A has 1 repeat; B has 4 repeats; a verdict needs 5"
    centre = float(np.exp(np.mean([np.log(np.median(e)) for e in few] if few[1:] else np.log(few))))
    assert both.a and both.b and both.ratio == pytest.approx(centre / 2)
    assert (both.a.value, both.b.value) == (2.0, pytest.approx(centre))
    assert (both.b.lo, both.b.hi, both.ratio_lo, both.floor) == (None, None, None, None)


def test_one_engine_alone_does_not_say_how_far_engines_differ() -> None:
    a, b = [[1.0, 1.01, 1.02, 0.99, 0.98]], [[2.0, 2.01, 2.02, 1.99, 1.98]]
    found = judged(a, b)
    assert found.verdict == Verdict.AMBIGUOUS and found.floor is None
    assert found.reason.startswith("one engine on A and B: how far engines differ is not known")
    assert "one engine on B:" in judged(STEADY, b).reason
    known = judged(a, b, floor=0.05)
    assert known.verdict == Verdict.SLOWER and known.floor == 0.05
    assert known.a and (known.a.n, known.a.n_process) == (5, 1)
    logs = np.log(a[0])
    lo, _ = scipy.stats.t.interval(0.99, 4, loc=logs.mean(), scale=scipy.stats.sem(logs))
    assert known.a.lo == pytest.approx(math.exp(lo)), "over its repeats"


def test_values_without_spread_have_no_interval() -> None:
    flat = [[5.0] * 6] * 5
    assert judged(flat, flat).verdict == Verdict.SAME
    found = judged(STEADY, flat)
    assert found.verdict == Verdict.AMBIGUOUS
    assert found.reason.startswith("B without any spread: copies, or below the clock's resolution")
    both = judged(flat, [[6.0] * 6] * 5)
    assert both.verdict == Verdict.AMBIGUOUS and both.reason.startswith("A and B without any")
    assert both.ratio == pytest.approx(1.2)


@pytest.mark.parametrize("nothing", [None, math.nan])
def test_a_missing_figure_is_named_with_its_reason(nothing: float | None) -> None:
    empty = Repeats(((nothing,) * 6,) * 5, "s", "no request has a second token")
    found = judge(side(STEADY), empty, "lower")
    assert found.verdict == Verdict.AMBIGUOUS
    assert found.reason == "B has no figure: no request has a second token"
    assert judge(Repeats((), "s"), side(STEADY), "lower").reason == (
        "A has no figure: it is null in every repeat"
    )
    assert found.ratio is None and found.b is None


def test_single_missing_repeats_are_left_out() -> None:
    holes = [[*engine[:5], math.nan] for engine in STEADY]
    found = judged(holes, SLOWER)
    assert found.a and (found.a.n, found.a.n_process) == (25, 5)
    assert found.a == judged([engine[:5] for engine in STEADY], SLOWER).a


@pytest.mark.parametrize("odd", [0.0, -1.0, math.inf])
def test_what_has_no_ratio_is_named(odd: float) -> None:
    found = judged([*STEADY[1:], [odd] * 6], SLOWER)
    assert found.verdict == Verdict.AMBIGUOUS
    assert found.reason == f"A has the value {odd:g}, of which there is no ratio"


def test_units_that_differ_are_not_compared() -> None:
    found = judge(side(STEADY, "s"), side(STEADY, "us"), "lower")
    assert found.verdict == Verdict.AMBIGUOUS
    assert found.reason == "different units: A in s, B in us"


@pytest.mark.parametrize("floor", [0.0, -0.1, math.nan, math.inf])
def test_wrong_calls_are_errors(floor: float) -> None:
    with pytest.raises(ValueError, match="better='faster': give higher or lower"):
        judge(side(STEADY), side(STEADY), "faster")
    with pytest.raises(ValueError, match="give a fraction above 0"):
        judged(STEADY, SLOWER, floor=floor)
    with pytest.raises(ValueError, match="a side with two engines"):
        engine_floor([[[1.0, 2.0]], [[1.0, 2.0]]])


# -- how often it is right ------------------------------------------------------------------------


def simulated(count: int, engines: int, ratio: float, *, between: float, within: float,
              disturbed: bool = False) -> Counter[str]:  # fmt: skip
    rng = np.random.default_rng(engines)
    found: Counter[str] = Counter()
    for seed in range(count):
        sides = [
            np.array(noisy(engines, 6, between=between, within=within, seed=2 * seed + n, centre=c))
            for n, c in ((0, 1.0), (1, ratio))
        ]
        if disturbed:  # one repeat in twenty meets something else that runs
            sides = [s * (1 + (rng.random(s.shape) < 0.05) * rng.exponential(0.2, s.shape))
                     for s in sides]  # fmt: skip
        found[str(judged(*(s.tolist() for s in sides)).verdict)] += 1
    return found


@pytest.mark.parametrize("disturbed", [False, True])
def test_equal_code_gives_hardly_an_alarm_and_a_tenth_is_found(disturbed: bool) -> None:
    """Engines that differ by 1 % and repeats by 2 %, five engines a side."""
    noise = {"between": 0.01, "within": 0.02, "disturbed": disturbed}
    alike = simulated(400, 5, 1.0, **noise)  # type: ignore[arg-type]
    assert alike["FASTER"] + alike["SLOWER"] < 0.02 * 400
    assert alike["SAME"] > 0.95 * 400
    slower = simulated(400, 5, 1.1, **noise)  # type: ignore[arg-type]
    assert slower["SLOWER"] > 0.95 * 400
    assert slower["FASTER"] == slower["SAME"] == 0


def test_noise_between_engines_is_no_evidence_however_many_repeats_lie_inside() -> None:
    """Repeats alone would tell these engines apart nearly always."""
    found = simulated(200, 3, 1.0, between=0.05, within=0.001)
    assert found["FASTER"] + found["SLOWER"] < 0.02 * 200


@pytest.mark.parametrize("engines", [3, 5])
def test_the_interval_of_a_centre_covers_it_in_99_of_100(engines: int) -> None:
    """Binomial bounds of 1,000 trials: 0.99 +- 4 x 0.0031."""
    hits = 0
    for seed in range(1000):
        found = judged(noisy(engines, 6, between=0.02, within=0.02, seed=seed), STEADY).a
        assert found is not None
        hits += found.lo <= 100 <= found.hi
    assert hits / 1000 > 0.977
