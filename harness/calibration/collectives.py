"""Collectives by size, measured by the engine's own communicators and joined over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.comm.types import Kind, Site
from harness.calibration.parts import (
    DTYPE,
    FUSED,
    FUSED_HOLDS,
    Curve,
    fused_shapes,
    marks,
    sizes,
)
from harness.measuring.roofline import bus_factor

if TYPE_CHECKING:
    from engine.comm.base import Communicator
    from harness.calibration.pairs import Enqueue, Pairs

COARSE = 0.01
"""A timer whose tick is above this part of a time gives means; below it medians, which rare
disturbances do not move."""
FUSED_INNER = 128
"""Columns of the input whose product is a summand of FUSED."""


@dataclass(frozen=True, slots=True)
class Readings:
    """One rank's readings of one size.

    Attributes:
        pairs_ns: [rounds, pairs] as read, NaN in rounds that starved; floor_ns: of the method.
        rows: of the summands, where FUSED sums them; else None.
    """

    bytes: int
    dtype: str
    pairs_ns: np.ndarray
    floor_ns: float
    tick_ns: int
    source: str
    rows: int | None = None


class CollectiveMeter:
    """Measures parts on one rank; what `crew` calls there."""

    def __init__(self, comm: Communicator, device: str, pairs: Pairs | None = None) -> None:
        from harness.calibration.pairs import device_pairs

        self._comm, self._at, self._device = comm, device, device.partition(":")[0]
        self._pairs = device_pairs(device) if pairs is None else pairs

    def __call__(self, name: str) -> list[Readings]:
        """Every size of a curve, in the same order on every rank."""
        curve = Curve.named(name)
        if curve.path == FUSED:
            shapes = fused_shapes(curve.world, self._device)
            return [self._measure_fused(curve.mode, *shape) for shape in shapes]
        return [self._measure(curve, *size) for size in sizes(curve.kind, self._device)]

    def _measure(self, curve: Curve, nbytes: int, dtype: str) -> Readings:
        run = self._comm.rehearse(Kind[curve.kind.upper()], nbytes, dtype)
        return self._readings(curve.mode, self._comm.align, run, nbytes, dtype)

    def _measure_fused(self, mode: str, rows: int, hidden: int) -> Readings:
        """What Communicator.reduce_add_norm does behind a row-parallel product, which is made anew
        in front of each and not timed. A round is an even number of sums, as a step is, so that
        each round and each replay begins with the first of the two sides."""
        import torch

        from engine.layers import RMSNorm

        of: dict[str, Any] = {"dtype": getattr(torch, DTYPE[self._device]), "device": self._at}
        x, weight = torch.zeros(rows, FUSED_INNER, **of), torch.zeros(hidden, FUSED_INNER, **of)
        residual, norm = torch.zeros(rows, hidden, **of), RMSNorm(hidden, 1e-6, **of)
        norm.weight.fill_(1.0)
        summand = torch.empty(0)

        def align() -> None:
            nonlocal summand
            summand = self._comm.partial_linear(x, weight, None)
            self._comm.align()

        def run() -> None:
            self._comm.reduce_add_norm(summand, residual, norm, Site.ATTN_O_PROJ)

        found = self._readings(mode, align, run, residual.nbytes, DTYPE[self._device])
        return replace(found, rows=rows)

    def _readings(
        self, mode: str, align: Enqueue, run: Enqueue, nbytes: int, dtype: str
    ) -> Readings:
        found, floor = self._pairs.measure(mode, align, run), self._pairs.floor_ns(mode)
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
    nccl-tests' factors. A figure that does not exist is None, and `reason` says why. Of FUSED the
    row has `rows`, the summands', and `holds`, what its times are of, besides.
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
    if curve.path == FUSED:
        found |= {"rows": first.rows, "holds": FUSED_HOLDS}
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
    if curve.path == FUSED:
        return found | {"reason": f"no bandwidth: the time is of {FUSED_HOLDS}"}
    algbw = first.bytes / time_us / 1e3
    factor = bus_factor(Kind[curve.kind.upper()], curve.world)
    return found | {"algbw_GBps": algbw, "busbw_GBps": algbw * factor}
