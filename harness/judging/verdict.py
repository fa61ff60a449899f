"""Whether two measurements differ: SAME, FASTER, SLOWER or AMBIGUOUS, and why."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from harness.judging.variance import smallest_detectable, t_quantile

MIN_REPEATS = 5
"""Of a side, over all its engines; with fewer nothing is decided."""
CLAIM = 0.99
"""Level of a side's interval. FASTER and SLOWER need a gap between the two."""
BAND = 0.95
"""Level of the ratio's interval and of the floor."""
COARSEST = 0.10
"""A floor above it, found in the data, gives no SAME: it would hide what people look for."""


class Verdict(StrEnum):
    """Of B against A."""

    SAME = "SAME"
    FASTER = "FASTER"
    SLOWER = "SLOWER"
    AMBIGUOUS = "AMBIGUOUS"


@dataclass(frozen=True, slots=True)
class Repeats:
    """One figure of one side.

    Attributes:
        engines: a tuple for each fresh engine with the figure of each repeat; None or NaN where a
            repeat has none.
        unit: of the figure.
        reason: why there is no figure at all, where somebody knows.
    """

    engines: tuple[tuple[float | None, ...], ...]
    unit: str
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Centre:
    """A side's centre and its 99 % interval, which fewer than MIN_REPEATS repeats do not have; n
    repeats of n_process engines."""

    value: float
    lo: float | None
    hi: float | None
    n: int
    n_process: int


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict and what it rests on.

    Attributes:
        ratio: centre of B / centre of A; ratio_lo, ratio_hi: its 95 % interval.
        floor: the smallest difference that counts, as a fraction: 0.03 is a factor of 1.03 either
            way. None where nobody knows it.
    """

    verdict: Verdict
    reason: str
    ratio: float | None = None
    ratio_lo: float | None = None
    ratio_hi: float | None = None
    floor: float | None = None
    a: Centre | None = None
    b: Centre | None = None


@dataclass(frozen=True, slots=True)
class _Side:
    """Logarithms that count as independent: an engine's median each, or, of one engine alone, its
    repeats. `n` repeats of `n_process` engines lie behind them."""

    logs: np.ndarray
    n: int
    n_process: int

    @property
    def mean(self) -> float:
        return float(self.logs.mean())

    @property
    def df(self) -> int:
        return len(self.logs) - 1

    @property
    def variance(self) -> float:
        """Of the mean."""
        return float(self.logs.var(ddof=1)) / len(self.logs)

    def centre(self) -> Centre:
        if self.n < MIN_REPEATS:
            return Centre(math.exp(self.mean), None, None, self.n, self.n_process)
        half = t_quantile(CLAIM, self.df) * math.sqrt(self.variance)
        value, lo, hi = (math.exp(self.mean + by) for by in (0.0, -half, half))
        return Centre(value, lo, hi, self.n, self.n_process)


def judge(a: Repeats, b: Repeats, better: str, floor: float | None = None) -> Judgement:
    """Judges B against A; never raises for what was measured, only for how it is called.

    Figures are compared as ratios, so all is done on logarithms. The unit of evidence is the fresh
    engine: each gives the median of its repeats, and a side's 99 % interval is Student's t over
    them (with one engine alone, over its repeats). Simulated with 2 to 8 engines of 6 repeats and
    as much variance between as within them, that interval covers 98.9 to 99.1 %; a hierarchical
    bootstrap covers 83 to 96 %, repeats taken as independent 81 %. Medians, since where one repeat
    in twenty is disturbed they find a slow-down of 10 % in 99 of 100 comparisons of five engines,
    means in 59. Overlap of intervals over fresh processes as evidence: Georges, Buytaert, Eeckhout,
    OOPSLA 2007; layers of repeats: Kalibera, Jones, ISMM 2013.

    Args:
        better: "higher" or "lower".
        floor: the smallest difference that counts, as a fraction; None: that of two engines of one
            side, from both sides' engines (see `engine_floor`).

    Returns:
        FASTER, SLOWER: the 99 % intervals have a gap, and the effect is above the floor.
        SAME: the ratio's 95 % interval (Welch) lies within the floor.
        AMBIGUOUS: all else, and whatever cannot be compared.

    Raises:
        ValueError: another word for `better`; a floor that is not positive.
    """
    if better not in ("higher", "lower"):
        raise ValueError(f"better={better!r}: give higher or lower")
    if floor is not None and not 0 < floor < math.inf:
        raise ValueError(f"floor={floor}: give a fraction above 0")
    if a.unit != b.unit:
        return _ambiguous(f"different units: A in {a.unit}, B in {b.unit}")
    read = [_read(name, side) for name, side in (("A", a), ("B", b))]
    wrong = [problem for problem in read if isinstance(problem, str)]
    sides = [side for side in read if isinstance(side, _Side)]
    if wrong:
        return _ambiguous("; ".join(wrong))
    return _compare(sides[0], sides[1], better, floor)


def engine_floor(sides: Iterable[Sequence[Sequence[float]]]) -> float:
    """The smallest detectable difference of two fresh engines, as a fraction: exp(t sqrt(2) s) - 1,
    where s is the standard deviation of the engines' log medians within a side, pooled over sides.

    Raises:
        ValueError: no side has two engines.
    """
    return _floor([np.log([np.median(engine) for engine in side]) for side in sides])


def _floor(sides: Sequence[np.ndarray]) -> float:
    df = sum(len(logs) - 1 for logs in sides)
    if df < 1:
        raise ValueError("a floor between engines needs a side with two engines")
    squares = sum(float(((logs - logs.mean()) ** 2).sum()) for logs in sides)
    return math.expm1(smallest_detectable(math.sqrt(squares / df), df, BAND))


def _read(name: str, side: Repeats) -> _Side | str:
    """The side as logarithms, or what is wrong with it."""
    found = [[v for v in e if v is not None and not math.isnan(v)] for e in side.engines]
    engines = [values for values in found if values]
    if not engines:
        return f"{name} has no figure: {side.reason or 'it is null in every repeat'}"
    odd = [v for values in engines for v in values if not 0 < v < math.inf]
    if odd:
        return f"{name} has the value {odd[0]:g}, of which there is no ratio"
    n = sum(map(len, engines))
    values = engines[0] if len(engines) == 1 else [float(np.median(e)) for e in engines]
    return _Side(np.log(values), n, len(engines))


def _compare(a: _Side, b: _Side, better: str, given: float | None) -> Judgement:
    centres = a.centre(), b.centre()
    difference = b.mean - a.mean
    found = Judgement(Verdict.AMBIGUOUS, "", math.exp(difference), a=centres[0], b=centres[1])
    few = [f"{name} has {_many(side.n, 'repeat')}" for name, side in (("A", a), ("B", b))
           if side.n < MIN_REPEATS]  # fmt: skip
    if few:
        return replace(found, reason=f"{'; '.join(few)}; a verdict needs {MIN_REPEATS}")
    flat = [name for name, side in (("A", a), ("B", b)) if np.ptp(side.logs) == 0]
    if len(flat) == 2 and difference == 0:
        return replace(found, verdict=Verdict.SAME, reason="every value of both sides is the same")
    if flat:
        reason = f"{' and '.join(flat)} without any spread: copies, or below the clock's resolution"
        return replace(found, reason=reason)
    half = t_quantile(BAND, _welch_df(a, b)) * math.sqrt(a.variance + b.variance)
    lo, hi = math.exp(difference - half), math.exp(difference + half)
    found = replace(found, ratio_lo=lo, ratio_hi=hi)
    single = [name for name, side in (("A", a), ("B", b)) if side.n_process == 1]
    if single and given is None:
        return replace(
            found,
            reason=f"one engine on {' and '.join(single)}: how far engines differ is not known; "
            "measure with measure.n_process=5, or give the floor",
        )
    floor = _floor([a.logs, b.logs]) if given is None else given
    verdict, reason = _decide(found, floor, given is None, better)
    return replace(found, verdict=verdict, reason=reason, floor=floor)


def _decide(found: Judgement, floor: float, own: bool, better: str) -> tuple[Verdict, str]:
    a, b = found.a, found.b
    assert a and b and found.ratio and found.ratio_lo and found.ratio_hi
    assert a.lo and a.hi and b.lo and b.hi
    effect = max(found.ratio, 1 / found.ratio) - 1
    gap = a.hi < b.lo or b.hi < a.lo
    band = f"the floor of {floor:.1%}"
    if gap and effect > floor:
        faster = (found.ratio > 1) == (better == "higher")
        verdict = Verdict.FASTER if faster else Verdict.SLOWER
        return verdict, f"99 % intervals apart, by a factor of {1 + effect:.3f} against {band}"
    if max(found.ratio_hi, 1 / found.ratio_lo) - 1 < floor:
        if own and floor > COARSEST:
            return Verdict.AMBIGUOUS, f"too noisy: two engines alike differ by up to {floor:.0%}"
        though = ", though the 99 % intervals are apart" if gap else ""
        return Verdict.SAME, f"95 % interval of the ratio within {band}{though}"
    if gap:
        return Verdict.AMBIGUOUS, f"99 % intervals apart, but {effect:.1%} is within {band}"
    beyond = effect > floor
    what = f"{effect:.1%} is above {band}" if beyond else f"the ratio's interval leaves {band}"
    return Verdict.AMBIGUOUS, f"99 % intervals overlap, and {what}; more fresh engines would tell"


def _welch_df(a: _Side, b: _Side) -> float:
    """Welch and Satterthwaite's degrees of freedom of a difference of means."""
    total = a.variance + b.variance
    return total**2 / (a.variance**2 / a.df + b.variance**2 / b.df)


def _ambiguous(reason: str) -> Judgement:
    return Judgement(Verdict.AMBIGUOUS, reason)


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
