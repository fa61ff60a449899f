from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats

from harness.judging.variance import one_way, smallest_detectable, t_quantile


def test_components_of_a_balanced_design_worked_by_hand() -> None:
    """Means 2, 6, 10 of a grand mean of 6: MSB = 2 (16 + 0 + 16) / 2 = 32; each engine's two
    repeats lie 1 off its mean: MSW = 3 x 2 / 3 = 2; between = (32 - 2) / 2 = 15."""
    found = one_way([[1, 3], [5, 7], [9, 11]])
    assert (found.within, found.between, found.icc) == (2.0, 15.0, 15 / 17)
    assert (found.engines, found.repeats) == (3, 6)
    assert (found.within_std, found.between_std) == (math.sqrt(2), math.sqrt(15))


def test_components_of_an_unbalanced_design_worked_by_hand() -> None:
    """Sizes 2 and 4, means 2 and 8, grand mean 6: MSB = 2 x 16 + 4 x 4 = 48, MSW = (2 + 20) / 4,
    n0 = 6 - (4 + 16) / 6 = 8 / 3."""
    found = one_way([[1, 3], [5, 7, 9, 11]])
    assert found.within == 5.5
    assert found.between == pytest.approx((48 - 5.5) / (8 / 3), rel=1e-14)


def test_engines_that_differ_less_than_their_repeats_have_a_negative_estimate() -> None:
    found = one_way([[1, 3], [3, 1], [1, 3]])
    assert (found.within, found.between, found.icc) == (2.0, -1.0, -1.0)
    assert found.between_std == 0.0
    assert one_way([[2, 2], [2, 2]]).icc is None


def test_estimates_of_unequal_engines_are_right_on_average() -> None:
    rng = np.random.default_rng(3)
    sizes = (2, 3, 6, 9)
    found = [
        one_way([(rng.normal(0, 2) + rng.normal(0, 1, size)).tolist() for size in sizes])
        for _ in range(3000)
    ]
    assert np.mean([f.within for f in found]) == pytest.approx(1.0, rel=0.03)
    assert np.mean([f.between for f in found]) == pytest.approx(4.0, rel=0.06)


@pytest.mark.parametrize("engines", [[[1, 2, 3]], [[1], [2]], [[1, 2], []]])
def test_what_gives_no_components_is_refused(engines: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="at least two engines, a repeat in each and two in one"):
        one_way(engines)


def test_quantiles_are_those_of_scipy_and_of_printed_tables() -> None:
    assert [round(t_quantile(0.99, df), 3) for df in (1, 3, 4, 9)] == [63.657, 5.841, 4.604, 3.25]
    for level, df in ((0.95, 2.5), (0.99, 7)):
        assert t_quantile(level, df) == pytest.approx(scipy.stats.t.ppf((1 + level) / 2, df))


def test_smallest_detectable_difference_of_well_known_noise_is_the_repeatability_limit() -> None:
    assert smallest_detectable(1.0, 1e9) == pytest.approx(2.77, abs=0.005)
    assert smallest_detectable(2.0, 4) == pytest.approx(2.776 * math.sqrt(2) * 2, rel=1e-3)
