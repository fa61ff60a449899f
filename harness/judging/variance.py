"""Variance of repeats in two layers: within a fresh engine, and between fresh engines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Components:
    """Variances of the one-way random-effects model y_ij = m + a_i + e_ij, in the data's unit
    squared; of logarithms of a figure, their roots are relative standard deviations.

    Attributes:
        within: of e, the repeats of one engine.
        between: of a, the engines, as estimated: below zero where engines differ less than their
            repeats explain.
        icc: between / (between + within), the share of a repeat's variance that its engine makes;
            None without any variance.
        engines, repeats: k engines and N repeats in all.
    """

    within: float
    between: float
    icc: float | None
    engines: int
    repeats: int

    @property
    def within_std(self) -> float:
        return math.sqrt(self.within)

    @property
    def between_std(self) -> float:
        """Root of `between`; an estimate below zero stands for none."""
        return math.sqrt(max(0.0, self.between))


def one_way(engines: Sequence[Sequence[float]]) -> Components:
    """Variance components by the method of moments (ANOVA estimators), for any numbers of repeats.

    MSB = sum n_i (mean_i - mean)^2 / (k - 1), MSW = sum (y_ij - mean_i)^2 / (N - k),
    within = MSW, between = (MSB - MSW) / n0 with n0 = (N - sum n_i^2 / N) / (k - 1), which is the
    number of repeats where all engines have as many (Searle, Casella, McCulloch: Variance
    Components, Wiley 1992). The intraclass correlation is ICC(1,1) of Shrout and Fleiss,
    Psychological Bulletin 86 (1979).

    Raises:
        ValueError: fewer than two engines, an empty one, or no engine with two repeats.
    """
    groups = [np.asarray(values, np.float64) for values in engines]
    sizes = np.array([len(group) for group in groups], np.float64)
    k, n = len(groups), int(sizes.sum())
    if k < 2 or n <= k or not sizes.all():
        raise ValueError(
            f"{k} engines with {n} repeats in all: variance components need at least two engines, "
            "a repeat in each and two in one"
        )
    means = np.array([group.mean() for group in groups])
    grand = float(np.concatenate(groups).mean())
    msb = float((sizes * (means - grand) ** 2).sum()) / (k - 1)
    msw = sum(float(((g - g.mean()) ** 2).sum()) for g in groups) / (n - k)
    n0 = (n - float((sizes**2).sum()) / n) / (k - 1)
    between = (msb - msw) / n0
    total = between + msw
    return Components(msw, between, between / total if total > 0 else None, k, n)


def t_quantile(level: float, df: float) -> float:
    """Two-sided quantile of Student's t: |t| stays below it with probability `level`."""
    from scipy.special import stdtrit

    return float(stdtrit(df, (1 + level) / 2))


def smallest_detectable(std: float, df: float, level: float = 0.95) -> float:
    """What two single readings of standard deviation `std`, itself estimated with `df` degrees of
    freedom, differ by at most, at `level`: t sqrt(2) std.

    With many degrees of freedom this is 1.96 sqrt(2) std = 2.77 std: the repeatability limit of
    ISO 5725-6, the smallest detectable change of test-retest studies (Weir, Journal of Strength and
    Conditioning Research 19, 2005).
    """
    return t_quantile(level, df) * math.sqrt(2) * std
