"""95 % intervals of a mean, a difference, a slope and a product of ratios."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.judging.variance import t_quantile

LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and its 95 % interval; NaN where too few values give none."""

    value: float
    lo: float
    hi: float

    @property
    def known(self) -> bool:
        return not math.isnan(self.lo)

    def within(self, lo: float, hi: float) -> bool | None:
        """Whether the true value lies in [lo, hi]: all of the interval does; False: none does;
        None: nobody can tell."""
        if not self.known:
            return None
        if lo <= self.lo and self.hi <= hi:
            return True
        return False if self.hi < lo or hi < self.lo else None


def mean(values: np.ndarray) -> Interval:
    """Of independent values, by Student's t."""
    n = len(values)
    if n < 2:
        value = float(values[0]) if n else math.nan
        return Interval(value, math.nan, math.nan)
    centre = float(values.mean())
    half = t_quantile(LEVEL, n - 1) * float(values.std(ddof=1)) / math.sqrt(n)
    return Interval(centre, centre - half, centre + half)


def difference(a: np.ndarray, b: np.ndarray) -> Interval:
    """Mean of b less that of a, independent values that may scatter differently: Welch's, as in
    `product`."""
    value = float(b.mean() - a.mean())
    if min(len(a), len(b)) < 2:
        return Interval(value, math.nan, math.nan)
    half = _half([(float(own.var(ddof=1)) / len(own), len(own)) for own in (a, b)])
    return Interval(value, value - half, value + half)


def _half(means: Sequence[tuple[float, int]]) -> float:
    """Half the interval of a contrast of means: (variance of a mean, values in it) of each."""
    total = sum(variance for variance, _ in means)
    if total <= 0:
        return 0.0
    each = (variance**2 / (n - 1) for variance, n in means)
    return t_quantile(LEVEL, total**2 / sum(each)) * math.sqrt(total)


def slope(x: np.ndarray, y: np.ndarray) -> tuple[Interval, float]:
    """(slope, intercept) of the least squares line, whose points may scatter more at one x than at
    another: the slope's variance is HC3 (MacKinnon, White, Journal of Econometrics 29, 1985).

    Raises:
        ValueError: fewer than three points, or all at one x.
    """
    n = len(x)
    if n < 3 or np.ptp(x) == 0:
        raise ValueError("a slope needs three points at two places")
    centred = x - x.mean()
    spread = float((centred**2).sum())
    value = float((centred * y).sum()) / spread
    intercept = float(y.mean() - value * x.mean())
    leverage = 1 / n + centred**2 / spread
    # A point alone at its x has leverage 1: the line passes through it, and it says nothing of the
    # scatter.
    free = leverage < 1 - 1e-9
    left = (y - intercept - value * x)[free] / (1 - leverage[free])
    error = math.sqrt(float(((centred[free] * left) ** 2).sum())) / spread
    half = t_quantile(LEVEL, n - 2) * error
    return Interval(value, value - half, value + half), intercept


def product(factors: Sequence[tuple[int, Sequence[Sequence[float]]]]) -> Interval:
    """Product of figures' centres, each to the power +1 or -1, with its 95 % interval.

    A centre is the geometric mean over fresh engines of the median of their repeats; the interval
    is that of a contrast of means of logarithms with unequal variances (Welch and Satterthwaite's
    degrees of freedom). Unknown where a factor has fewer than two engines.
    """
    logs = [np.log([np.median(engine) for engine in engines]) for _, engines in factors]
    value = sum(sign * float(own.mean()) for (sign, _), own in zip(factors, logs, strict=True))
    if min(map(len, logs)) < 2:
        return Interval(math.exp(value), math.nan, math.nan)
    half = _half([(float(own.var(ddof=1)) / len(own), len(own)) for own in logs])
    return Interval(math.exp(value), math.exp(value - half), math.exp(value + half))
