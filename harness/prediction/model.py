"""The time of a decode step: a roofline, a cost a layer, and its collectives.

    step = max(r x weights / (tp x read bandwidth), m x operations / (tp x matmul rate))
           + r x (K/V + logits) / (tp x read bandwidth) + l x layers + collectives

Each product reads its weight once and does 2 x batch operations with it, so in one step all of them
are bound by the same of the two (Williams, Waterman, Patterson, "Roofline", CACM 2009); attention
is bound by reading K and V. The rates and the collectives' skew-free times are this machine's
calibration (those of comm=symm_fused hold the addition and the norm behind a sum); r, m and l are
fitted (1/r and 1/m are the efficiencies against those rates, l the microseconds that a layer costs
beyond them: launches, hand-overs between kernels, norms).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.comm.fused import most_rows
from engine.shape import ModelShape
from harness.calibration.curves import Curves
from harness.calibration.parts import FUSED, payload
from harness.measuring.roofline import Ceilings, mean_decode_cost
from harness.observers.records import ITEM_BYTES

TERMS = ("read", "matmul", "layers")


class PredictionError(ValueError):
    """What the measured cells do not support; the text says what is missing."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A decode step of a fixed batch.

    Attributes:
        model: name; path: the communicator's, None with one rank; graph: a replay.
        compiled: torch compiled the layers.
        step_us: measured, None where it is to be predicted.
    """

    model: str
    shape: ModelShape
    tp: int
    batch: int
    prompt_tokens: int
    output_tokens: int
    dtype: str
    path: str | None
    graph: bool
    compiled: bool = False
    step_us: float | None = None


@dataclass(frozen=True, slots=True)
class Parts:
    """A step before any fit.

    Attributes:
        weights, matmul: us of reading the weights, and of the operations with them, at full rates.
        reading: us of reading K and V and writing logits at the full rate.
        layers: their number; comm_us: of collectives.
    """

    weights: float
    matmul: float
    reading: float
    layers: float
    comm_us: float

    @property
    def intensity(self) -> float:
        """Above r / m operations bind the products, below it reading."""
        return self.matmul / self.weights

    def columns(self, computes: bool) -> tuple[float, float, float]:
        """What r, m and l are multiplied by, where operations bind the products or do not."""
        read = self.reading if computes else self.reading + self.weights
        return read, self.matmul if computes else 0.0, self.layers


def parts_of(cell: Cell, ceilings: Ceilings, curves: Curves) -> Parts:
    """The terms of a cell.

    Raises:
        CalibrationError: a collective that the calibration does not support.
        PredictionError: no decode step.
    """
    cost = mean_decode_cost(
        cell.shape, tp=cell.tp, itemsize=ITEM_BYTES[cell.dtype], batch=cell.batch,
        prompt_tokens=cell.prompt_tokens, output_tokens=cell.output_tokens,
    )  # fmt: skip
    if cost is None:
        raise PredictionError(f"workload.output_tokens={cell.output_tokens}: no decode step")
    read, matmul = (1e6 / (cell.tp * rate)
                    for rate in (ceilings.read_bytes_s, ceilings.matmul_flops_s))  # fmt: skip
    return Parts(
        weights=cost.weights_bytes * read,
        matmul=cost.matmul_flops * matmul,
        reading=(cost.kv_bytes + cost.logits_bytes) * read,
        layers=float(cell.shape.num_layers),
        comm_us=_comm_us(cell, curves),
    )


def _comm_us(cell: Cell, curves: Curves) -> float:
    """2L + 1 all-reduces, a gather of logits and a broadcast of ids; none with one rank."""
    if cell.tp == 1:
        return 0.0
    mode = "graph" if cell.graph else "eager"
    shape, total = cell.shape, 0.0
    for (kind, path), count in _collectives(cell).items():
        size = payload(kind, shape.hidden_size, shape.vocab_size, cell.batch, cell.dtype)
        total += count * curves.time_us(kind, path, mode, cell.tp, size)
    return total


def _collectives(cell: Cell) -> dict[tuple[str, str], int]:
    """(kind, calibrated path) -> how many a step has. By FUSED the layers' 2L sums are its own,
    where no code is compiled and its kernel takes so many rows; the rest is as calibrate says."""
    assert cell.path is not None
    shape = cell.shape
    sums = 2 * shape.num_layers
    if cell.path != FUSED:
        counts = {"all_reduce": sums + 1, "gather": 1, "broadcast": 1}
        return {(kind, cell.path): count for kind, count in counts.items()}
    most = most_rows(shape.hidden_size, getattr(torch, cell.dtype), cell.tp)
    own = {("all_reduce", FUSED): sums} if not cell.compiled and cell.batch <= most else {}
    plain = {("all_reduce", "symm_mem"): sums + 1 - sum(own.values())}
    return {**own, **plain, ("gather", "nccl"): 1, ("broadcast", "nccl"): 1}


@dataclass(frozen=True, slots=True)
class Fit:
    """r, m and l; m is 0 where operations bind no product."""

    read: float
    matmul: float
    layers: float

    def terms_us(self, parts: Parts) -> dict[str, float]:
        """What each term adds to the step, collectives included. What binds the products holds
        them: `read`, with the weights, or `matmul`, which is 0 otherwise."""
        computes = self.matmul * parts.matmul > self.read * parts.weights
        factors = (self.read, self.matmul, self.layers)
        found = {
            name: factor * amount
            for name, factor, amount in zip(TERMS, factors, parts.columns(computes), strict=True)
        }
        return {**found, "comm": parts.comm_us}

    def step_us(self, parts: Parts) -> float:
        return sum(self.terms_us(parts).values())


def fit(parts: Sequence[Parts], steps_us: Sequence[float]) -> Fit:
    """Least squares of the relative error, r and m at least 1 (nothing is faster than the ceilings)
    and l at least 0: of the fits for each intensity from which on operations bind the products, the
    one that explains the cells best.

    Raises:
        PredictionError: the cells cannot tell the three terms apart.
    """
    if len(parts) < len(TERMS):
        raise PredictionError(f"{len(parts)} cells; {len(TERMS)} terms need at least as many")
    best, least = None, np.inf
    for bound in [np.inf, *sorted({p.intensity for p in parts}, reverse=True)]:
        one = _bound_from(bound, parts, steps_us)
        if one is None:
            continue
        errors = [one.step_us(p) / t - 1 for p, t in zip(parts, steps_us, strict=True)]
        missed = float(np.dot(errors, errors))
        if missed < least - 1e-9:  # as good is no reason for a further term
            best, least = one, missed
    if best is None:
        raise PredictionError(
            "the cells cannot tell reading, operations and layers apart; measure more batches "
            "and a second TP size or model"
        )
    return best


def _bound_from(bound: float, parts: Sequence[Parts], steps_us: Sequence[float]) -> Fit | None:
    """With operations that bind the products from the intensity `bound` on; m is 0 where they bind
    none. None: the terms cannot be told apart, or at the ceiling operations would bind some."""
    from scipy.optimize import lsq_linear

    times = np.asarray(steps_us, np.float64)
    columns = np.array([p.columns(p.intensity >= bound) for p in parts], np.float64)
    scale = columns.max(axis=0)
    there = scale > 0
    weighted = columns[:, there] / scale[there] / times[:, None]
    rank = np.linalg.matrix_rank(weighted, tol=1e-3 * np.linalg.norm(weighted, 2))
    if rank < there.sum():
        return None
    lowest = np.array([1.0, 1.0, 0.0])[there] * scale[there]
    comm = np.array([p.comm_us for p in parts])
    solved = lsq_linear(weighted, (times - comm) / times, (lowest, np.inf), method="bvls")
    factors = np.zeros(len(TERMS))
    factors[there] = solved.x / scale[there]
    read, matmul, layers = (float(value) for value in factors)
    if matmul == 0 and max(p.intensity for p in parts) > read:
        return None
    return Fit(read, matmul, layers)
