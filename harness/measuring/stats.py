"""Summaries of repeated values: percentiles, spread and the interval of the mean."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

PERCENTILES = {"p50": 50, "p90": 90, "p99": 99}
SUMMARY = (*PERCENTILES, "mean", "min", "max", "std", "ci_lo", "ci_hi")

# Two-sided 95 % quantiles of Student's t for 1 to 30 degrees of freedom; beyond them 1.96 + 2.5/df,
# which is off by less than 0.003 there.
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


def t95(df: int) -> float:
    """Two-sided 95 % quantile of Student's t with `df` >= 1 degrees of freedom."""
    return _T95[df - 1] if df <= len(_T95) else 1.96 + 2.5 / df


def summary(values: Sequence[float] | np.ndarray) -> dict[str, float | None]:
    """Every statistic of SUMMARY; None where the number of values does not give it.

    Percentiles interpolate linearly between order statistics; std has n - 1; the interval is that
    of the mean at 95 % with values taken as independent.
    """
    data = np.asarray(values, dtype=np.float64)
    n = len(data)
    found: dict[str, float | None] = dict.fromkeys(SUMMARY)
    if n == 0:
        return found
    for name, percent in PERCENTILES.items():
        found[name] = float(np.percentile(data, percent))
    mean = float(data.mean())
    found |= {"mean": mean, "min": float(data.min()), "max": float(data.max())}
    if n > 1:
        std = float(data.std(ddof=1))
        half = t95(n - 1) * std / math.sqrt(n)
        found |= {"std": std, "ci_lo": mean - half, "ci_hi": mean + half}
    return found


def relative_noise(values: Sequence[float]) -> float | None:
    """Standard deviation / median; None for fewer than two values or a median of zero."""
    if len(values) < 2 or float(np.median(values)) == 0:
        return None
    return float(np.std(values, ddof=1) / np.median(values))
