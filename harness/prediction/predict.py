"""Predicted rows of a group, and the errors on cells that were left out of the fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from engine.errors import ConfigError
from engine.shape import ModelShape
from harness.calibration.curves import CalibrationError, Curves
from harness.measuring.roofline import Ceilings, weights_read
from harness.observers.records import ITEM_BYTES
from harness.prediction.cells import Group
from harness.prediction.model import Cell, Fit, Parts, PredictionError, fit, parts_of

AXES = ("tp", "model", "batch")


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Errors (predicted / measured - 1) on the cells of one value of an axis, fitted without them.

    Attributes:
        errors: empty where there is a `reason` why the rest cannot be fitted.
    """

    axis: str
    value: Any
    errors: tuple[float, ...]
    reason: str | None = None

    @property
    def mean(self) -> float | None:
        """Of the absolute errors."""
        return float(np.mean(np.abs(self.errors))) if self.errors else None

    @property
    def largest(self) -> float | None:
        return float(np.max(np.abs(self.errors))) if self.errors else None


@dataclass(frozen=True, slots=True)
class Fitted:
    """A group with its fit, or with the reason why there is none.

    Attributes:
        group: of the cells that are fitted; parts: theirs.
        apart: further measured cells, and why each has no terms to be fitted by.
    """

    group: Group
    parts: tuple[Parts, ...]
    fit: Fit | None
    reason: str | None
    left_out: tuple[LeftOut, ...]
    apart: tuple[tuple[Cell, str], ...] = ()

    @property
    def errors(self) -> list[float]:
        """On the cells of the fit themselves."""
        if self.fit is None:
            return []
        return _errors(self.fit, self.parts, _times(self.group.cells))


def fitted(group: Group, ceilings: Ceilings, curves: Curves) -> Fitted:
    """Fits all cells of a group that the calibration supports, and all of them but each value of
    each axis in turn."""
    cells, parts, apart = [], [], []
    for cell in group.cells:
        try:
            parts.append(parts_of(cell, ceilings, curves))
            cells.append(cell)
        except (PredictionError, CalibrationError) as error:
            apart.append((cell, str(error)))
    group = replace(group, cells=cells)
    try:
        whole = fit(parts, _times(cells))
    except PredictionError as error:
        reason = "; ".join([str(error), *notes(apart)])
        return Fitted(group, (), None, reason, (), tuple(apart))
    left_out = []
    for axis in AXES:
        values = sorted({getattr(cell, axis) for cell in cells})
        if len(values) > 1:
            left_out += [_leave_out(axis, value, cells, parts) for value in values]
    return Fitted(group, tuple(parts), whole, None, tuple(left_out), tuple(apart))


def notes(apart: Sequence[tuple[Cell, str]]) -> list[str]:
    """Of the cells that are in no fit: how many for each reason."""
    counts = Counter(reason for _, reason in apart)
    return [f"{n} cells left out of the fit: {reason}" for reason, n in counts.items()]


def _leave_out(axis: str, value: Any, cells: Sequence[Cell], parts: Sequence[Parts]) -> LeftOut:
    inside = [getattr(cell, axis) != value for cell in cells]
    times = _times(cells)
    kept = [(p, t) for p, t, chosen in zip(parts, times, inside, strict=True) if chosen]
    out = [(p, t) for p, t, chosen in zip(parts, times, inside, strict=True) if not chosen]
    try:
        rest = fit([p for p, _ in kept], [t for _, t in kept])
    except PredictionError as error:
        return LeftOut(axis, value, (), str(error))
    return LeftOut(axis, value, tuple(_errors(rest, *zip(*out, strict=True))))


def _errors(fit: Fit, parts: Sequence[Parts], times: Sequence[float]) -> list[float]:
    return [fit.step_us(p) / t - 1 for p, t in zip(parts, times, strict=True)]


def _times(cells: Sequence[Cell]) -> list[float]:
    times = [cell.step_us for cell in cells]
    assert None not in times
    return [float(t) for t in times if t is not None]


def rows(
    group: Fitted,
    ceilings: Ceilings,
    curves: Curves,
    *,
    tps: Sequence[int],
    batches: Sequence[int],
    models: Mapping[str, ModelShape],
    memory_bytes: int | None = None,
) -> list[dict[str, Any]]:
    """A row a cell: the measured ones (status ok) with what the fit makes of them, or `skipped`
    with the reason why they are in no fit; then every combination of measured and asked values, by
    every path that ranks took, that was not measured: `predicted`, or `skipped` with the reason why
    nothing supports it.

    Args:
        memory_bytes: of one GPU; a model whose weights are larger does not run there.
    """
    found = []
    if group.fit is not None:
        for cell, parts in zip(group.group.cells, group.parts, strict=True):
            found.append(_row(group, cell, "ok", parts))
        found += [_row(group, cell, "skipped", None, why) for cell, why in group.apart]
    cells = [*group.group.cells, *(cell for cell, _ in group.apart)]
    shapes = {cell.model: cell.shape for cell in cells} | dict(models)
    at = {(c.model, c.tp, c.batch, c.path, c.prompt_tokens, c.output_tokens) for c in cells}
    paths = list(dict.fromkeys(c.path for c in cells if c.tp > 1)) or [None]
    lengths = dict.fromkeys((c.prompt_tokens, c.output_tokens) for c in cells)
    all_tps = sorted({c.tp for c in cells} | set(tps))
    all_batches = sorted({c.batch for c in cells} | set(batches))
    ways = [(tp, path) for tp in all_tps for path in (paths if tp > 1 else [None])]
    for model, (tp, path), batch, length in product(shapes, ways, all_batches, lengths):
        if (model, tp, batch, path, *length) in at:
            continue
        cell = replace(
            cells[0], model=model, shape=shapes[model], tp=tp, batch=batch, path=path,
            prompt_tokens=length[0], output_tokens=length[1], step_us=None,
        )  # fmt: skip
        try:
            supported(group, cell, memory_bytes)
            found.append(_row(group, cell, "predicted", parts_of(cell, ceilings, curves)))
        except (PredictionError, CalibrationError, ConfigError) as error:
            found.append(_row(group, cell, "skipped", None, str(error)))
    return found


def supported(group: Fitted, cell: Cell, memory_bytes: int | None = None) -> None:
    """An axis may be left only where leaving one of its measured values out has been tried, and a
    batch not beyond those measured.

    Raises:
        PredictionError: otherwise, and where no cell of its path is in the fit; the text says what
            to measure.
        ConfigError: the model cannot be split so.
    """
    cell.shape.check_tp(cell.tp)
    if group.fit is None:
        assert group.reason is not None
        raise PredictionError(group.reason)
    weights = weights_read(cell.shape, tp=cell.tp, tokens=1, itemsize=ITEM_BYTES[cell.dtype])
    if memory_bytes is not None and weights / cell.tp > memory_bytes:
        raise PredictionError(
            f"{weights / cell.tp / 1e9:.0f} GB of weights a GPU, which has {memory_bytes / 1e9:.0f}"
        )
    cells = group.group.cells
    if cell.tp > 1 and cell.path not in {c.path for c in cells}:
        for one, reason in group.apart:
            if one.path == cell.path:
                raise PredictionError(f"no cell by comm={one.path} is in the fit: {reason}")
    batches = sorted({c.batch for c in cells})
    if not batches[0] <= cell.batch <= batches[-1]:
        raise PredictionError(
            f"batch={cell.batch}: measured are {batches[0]} to {batches[-1]}; measure further ones"
        )
    for axis in new_axes(group, cell):
        tried = [one for one in group.left_out if one.axis == axis and one.errors]
        if not tried:
            there = ", ".join(str(v) for v in sorted({getattr(c, axis) for c in cells}))
            raise PredictionError(
                f"{axis}={getattr(cell, axis)}: measured is {there} alone, so that no error can be "
                f"given; measure another {axis}"
            )


def new_axes(group: Fitted, cell: Cell) -> list[str]:
    """Axes of whose values the cell has one that no cell of the fit has."""
    return [
        axis
        for axis in AXES
        if getattr(cell, axis) not in {getattr(c, axis) for c in group.group.cells}
    ]


def _row(
    group: Fitted, cell: Cell, status: str, parts: Parts | None, reason: str | None = None
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "status": status, "model": cell.model, "tp": cell.tp, "batch": cell.batch,
        "comm": "solo" if cell.tp == 1 else cell.path, **group.group.settings,
        "prompt_tokens": cell.prompt_tokens, "output_tokens": cell.output_tokens,
        "measured_us": cell.step_us, "reason": reason,
    }  # fmt: skip
    names = ("predicted_us", "read_us", "matmul_us", "layers_us", "comm_us", "comm_share",
             "decode_tok_s", "error", "expected_error")  # fmt: skip
    row |= dict.fromkeys(names)
    if parts is None or group.fit is None:
        return row
    terms = group.fit.terms_us(parts)
    step_us = sum(terms.values())
    row |= {f"{name}_us": us for name, us in terms.items()}
    row |= {"predicted_us": step_us, "comm_share": terms["comm"] / step_us}
    row["decode_tok_s"] = cell.batch / step_us * 1e6
    if cell.step_us is not None:
        row["error"] = step_us / cell.step_us - 1
    else:
        # Of a combination that is new though each value is known: the largest of all three axes.
        axes = new_axes(group, cell) or AXES
        means = [o.mean for o in group.left_out if o.axis in axes and o.mean is not None]
        row["expected_error"] = max(means, default=None)
    return row
