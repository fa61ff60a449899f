"""The time of a decode step: what it must move and do, a cost a layer, and its collectives.

    step = r x bytes / (tp x read bandwidth) + m x operations / (tp x matmul rate)
           + l x layers + collectives

The rates and the collectives' skew-free times are this machine's calibration; r, m and l are fitted
(1/r and 1/m are the efficiencies against those rates, l the microseconds that a layer costs beyond
them: launches, hand-overs between kernels, what is neither matmul nor reading).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.shape import ModelShape
from harness.calibration.curves import Curves
from harness.calibration.parts import payload
from harness.records import ITEM_BYTES
from harness.roofline import Ceilings, mean_decode_cost

TERMS = ("read", "matmul", "layers")


class PredictionError(ValueError):
    """What the measured cells do not support; the text says what is missing."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A decode step of a fixed batch.

    Attributes:
        model: name; path: the communicator's, None with one rank; graph: a replay.
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
    step_us: float | None = None


@dataclass(frozen=True, slots=True)
class Parts:
    """A step's terms before any fit: us at full rates (read, matmul), layers, us of collectives."""

    read: float
    matmul: float
    layers: float
    comm_us: float

    @property
    def fitted(self) -> tuple[float, float, float]:
        return self.read, self.matmul, self.layers


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
    return Parts(
        read=cost.bytes / (cell.tp * ceilings.read_bytes_s) * 1e6,
        matmul=cost.flops / (cell.tp * ceilings.matmul_flops_s) * 1e6,
        layers=float(cell.shape.num_layers),
        comm_us=_comm_us(cell, curves),
    )


def _comm_us(cell: Cell, curves: Curves) -> float:
    """2L + 1 all-reduces, a gather of logits and a broadcast of ids; none with one rank."""
    if cell.tp == 1:
        return 0.0
    assert cell.path is not None
    mode = "graph" if cell.graph else "eager"
    shape, total = cell.shape, 0.0
    counts = {"all_reduce": 2 * shape.num_layers + 1, "gather": 1, "broadcast": 1}
    for kind, count in counts.items():
        size = payload(kind, shape.hidden_size, shape.vocab_size, cell.batch, cell.dtype)
        total += count * curves.time_us(kind, cell.path, mode, cell.tp, size)
    return total


@dataclass(frozen=True, slots=True)
class Fit:
    """r, m and l; 0: the cells are explained best without the term."""

    read: float
    matmul: float
    layers: float

    def terms_us(self, parts: Parts) -> dict[str, float]:
        """What each term adds to the step, collectives included."""
        factors = (self.read, self.matmul, self.layers)
        found = {
            name: factor * amount
            for name, factor, amount in zip(TERMS, factors, parts.fitted, strict=True)
        }
        return {**found, "comm": parts.comm_us}

    def step_us(self, parts: Parts) -> float:
        return sum(self.terms_us(parts).values())


def fit(parts: Sequence[Parts], steps_us: Sequence[float]) -> Fit:
    """Least squares of the relative error, no factor below zero.

    Raises:
        PredictionError: the cells cannot tell the three terms apart.
    """
    from scipy.optimize import nnls

    times = np.asarray(steps_us, np.float64)
    columns = np.array([p.fitted for p in parts], np.float64).reshape(len(parts), len(TERMS))
    scale = columns.max(axis=0, initial=0.0)
    if len(times) < len(TERMS) or not scale.all():
        raise PredictionError(f"{len(times)} cells; {len(TERMS)} terms need at least as many")
    weighted = columns / scale / times[:, None]
    if np.linalg.matrix_rank(weighted, tol=1e-3 * np.linalg.norm(weighted, 2)) < len(TERMS):
        raise PredictionError(
            "the cells cannot tell reading, operations and layers apart; measure more batches "
            "and a second TP size or model"
        )
    comm = np.array([p.comm_us for p in parts])
    found, _ = nnls(weighted, (times - comm) / times)
    read, matmul, layers = (float(value) for value in found / scale)
    return Fit(read, matmul, layers)
