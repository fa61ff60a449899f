"""Collectives by size, measured by the engine's own communicators and joined over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.comm.types import Kind
from harness.calibration.parts import Curve, marks, sizes
from harness.measuring.roofline import bus_factor

if TYPE_CHECKING:
    from engine.comm.base import Communicator
    from harness.calibration.pairs import Pairs

COARSE = 0.01
"""A timer whose tick is above this part of a time gives means; below it medians, which rare
disturbances do not move."""


@dataclass(frozen=True, slots=True)
class Readings:
    """One rank's readings of one size.

    Attributes:
        pairs_ns: [rounds, pairs] as read, NaN in rounds that starved; floor_ns: of the method.
    """

    bytes: int
    dtype: str
    pairs_ns: np.ndarray
    floor_ns: float
    tick_ns: int
    source: str


class CollectiveMeter:
    """Measures parts on one rank; what `crew` calls there."""

    def __init__(self, comm: Communicator, device: str, pairs: Pairs | None = None) -> None:
        from harness.calibration.pairs import device_pairs

        self._comm, self._device = comm, device.partition(":")[0]
        self._pairs = device_pairs(device) if pairs is None else pairs

    def __call__(self, name: str) -> list[Readings]:
        """Every size of a curve, in the same order on every rank."""
        curve = Curve.named(name)
        return [self._measure(curve, *size) for size in sizes(curve.kind, self._device)]

    def _measure(self, curve: Curve, nbytes: int, dtype: str) -> Readings:
        run = self._comm.rehearse(Kind[curve.kind.upper()], nbytes, dtype)
        found = self._pairs.measure(curve.mode, self._comm.align, run)
        floor = self._pairs.floor_ns(curve.mode)
        return Readings(nbytes, dtype, found, floor, self._pairs.tick_ns, self._pairs.source)


def rows(name: str, ranks: Sequence[Sequence[Readings]], device: str) -> list[dict[str, Any]]:
    """The rows of a curve, from each rank's readings of the same sizes in the same order."""
    curve = Curve.named(name)
    marked = marks(curve.kind, device)
    return [
        {**row(curve, of_size), "mark": marked.get(of_size[0].bytes)}
        for of_size in zip(*ranks, strict=True)
    ]


def row(curve: Curve, ranks: Sequence[Readings]) -> dict[str, Any]:
    """One size.

    transfer_us is of an all-reduce the shortest time of a rank, pair by pair, of a rooted kind the
    root's own; less the floor, never clamped. wait_us is the mean of what ranks read above it: what
    is left of skew, and how much a coarse tick biases the minimum. stat says whether transfer_us is
    the median or, where the tick is coarse, the mean. algbw = bytes / transfer_us, busbw by
    nccl-tests' factors. A figure that does not exist is None, and `reason` says why.
    """
    first = ranks[0]
    assert {(r.bytes, r.dtype) for r in ranks} == {(first.bytes, first.dtype)}
    latency = np.stack([(r.pairs_ns.ravel() - r.floor_ns) / 1e3 for r in ranks], axis=1)  # [N, R]
    kept = latency[~np.isnan(latency).any(axis=1)]
    tick_us = max(r.tick_ns for r in ranks) / 1e3
    found: dict[str, Any] = {
        "kind": curve.kind, "path": curve.path, "world": curve.world, "mode": curve.mode,
        "bytes": first.bytes, "dtype": first.dtype, "source": first.source,
        "n": len(kept), "n_starved": len(latency) - len(kept),
        "floor_us": float(np.mean([r.floor_ns for r in ranks])) / 1e3, "tick_us": tick_us,
    }  # fmt: skip
    names = ("transfer_us", "stat", "p10_us", "p50_us", "p90_us", "mean_us", "wait_us",
             "algbw_GBps", "busbw_GBps", "reason")  # fmt: skip
    found |= dict.fromkeys(names)
    if len(kept) == 0:
        return found | {"reason": "the host was never ahead of the GPU: every round starved"}
    transfer = kept.min(axis=1) if curve.kind == "all_reduce" else kept[:, 0]
    mean, p50 = float(transfer.mean()), float(np.median(transfer))
    stat = "mean" if tick_us > COARSE * abs(p50) else "p50"
    time_us = mean if stat == "mean" else p50
    found |= {"transfer_us": time_us, "stat": stat, "mean_us": mean}
    if curve.kind == "all_reduce":
        found["wait_us"] = float((kept - transfer[:, None]).mean())
    if p50 >= 2 * tick_us:  # single values below two ticks say nothing
        found |= {f"p{q}_us": float(np.percentile(transfer, q)) for q in (10, 50, 90)}
    if time_us <= 0:
        return found | {"reason": "no bandwidth: the time is not above the floor"}
    algbw = first.bytes / time_us / 1e3
    factor = bus_factor(Kind[curve.kind.upper()], curve.world)
    return found | {"algbw_GBps": algbw, "busbw_GBps": algbw * factor}
