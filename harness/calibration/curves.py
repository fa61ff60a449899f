"""Times of collectives from a calibration: between its sizes, at other numbers of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.comm.types import Kind
from harness.measuring.roofline import bus_factor

Key = tuple[str, str, str]
"""(kind, path, mode)"""


class CalibrationError(ValueError):
    """A time that the calibration does not support; the text says what to measure."""


@dataclass(frozen=True, slots=True)
class Hockney:
    """Time of a collective over n ranks: alpha + gamma log2(n) + beta bytes f(n), in us, where f is
    the part of the payload that a link carries (2(n-1)/n, (n-1)/n, 1), as in R. Thakur,
    R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in MPICH", 2005.

    With one number of ranks calibrated gamma is 0: latency is then taken as the same everywhere.
    """

    alpha_us: float
    gamma_us: float
    beta_us: float

    def time_us(self, kind: str, world: int, nbytes: float) -> float:
        carried = nbytes * bus_factor(Kind[kind.upper()], world)
        return self.alpha_us + self.gamma_us * math.log2(world) + self.beta_us * carried


class Curves:
    """Interpolates in the logarithms of bytes and time, which is exact for a constant and for a
    time in proportion to the bytes."""

    def __init__(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """rows: as of `Calibration.curve_rows`; those without a time above zero are left out."""
        self._points: dict[Key, dict[int, dict[int, float]]] = {}
        for row in rows:
            if (row["transfer_us"] or 0) > 0:
                key = (row["kind"], row["path"], row["mode"])
                of_world = self._points.setdefault(key, {}).setdefault(row["world"], {})
                of_world[row["bytes"]] = row["transfer_us"]
        self._models = {key: _fit(key[0], points) for key, points in self._points.items()}

    def worlds(self, kind: str, path: str, mode: str) -> list[int]:
        """Calibrated numbers of ranks."""
        return sorted(self._points.get((kind, path, mode), {}))

    def time_us(self, kind: str, path: str, mode: str, world: int, nbytes: int) -> float:
        """Skew-free time of one collective. At a number of ranks that was not calibrated: that of
        the nearest one, times the ratio of the fitted model's two values.

        Raises:
            CalibrationError: nothing of the kind was calibrated, or no size as small or as large.
        """
        key = (kind, path, mode)
        if key not in self._points:
            raise CalibrationError(
                f"no {mode} {kind} over {path} is calibrated; measure it by "
                f"python -m harness calibrate --world {world}"
            )
        near = min(self._points[key], key=lambda n: (abs(math.log2(n / world)), n))
        points = self._points[key][near]
        if not min(points) <= nbytes <= max(points):
            raise CalibrationError(
                f"{kind} of {nbytes} bytes: calibrated over {path} are {min(points)} to "
                f"{max(points)} bytes"
            )
        sizes = sorted(points)
        times = [math.log(points[size]) for size in sizes]
        found = math.exp(float(np.interp(math.log(nbytes), np.log(sizes), times)))
        if near == world:
            return found
        model = self._models[key]
        return found * model.time_us(kind, world, nbytes) / model.time_us(kind, near, nbytes)

    def model(self, kind: str, path: str, mode: str) -> Hockney:
        """What other numbers of ranks are computed by."""
        return self._models[kind, path, mode]


def _fit(kind: str, points: Mapping[int, Mapping[int, float]]) -> Hockney:
    """Least squares of the relative error, no term below zero."""
    from scipy.optimize import nnls

    flat = [(n, size, us) for n, of_size in points.items() for size, us in of_size.items()]
    factors = {n: bus_factor(Kind[kind.upper()], n) for n in points}
    latency = [math.log2(n) if len(points) > 1 else 0.0 for n, _, _ in flat]
    times = np.array([us for _, _, us in flat])
    columns = np.array([[1.0, log, size * factors[n]] for (n, size, _), log in
                        zip(flat, latency, strict=True)])  # fmt: skip
    scale = columns.max(axis=0)
    scale[scale == 0] = 1.0
    found, _ = nnls(columns / scale / times[:, None], np.ones(len(times)))
    alpha, gamma, beta = found / scale
    return Hockney(float(alpha), float(gamma), float(beta))
