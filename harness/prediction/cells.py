"""Measured decode steps of runs, in groups that one model of the step can hold."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import ConfigError
from engine.shape import ModelShape
from harness.machine.hardware import fingerprint
from harness.measuring.pass_plan import NSYS
from harness.prediction.model import Cell, PredictionError
from harness.store import load
from harness.tables.marker import worst_status

if TYPE_CHECKING:
    import pandas as pd

MODE = ("device", "enforce_eager", "compile", "attention", "dtype", "page_size")
"""Settings that a group has in common, as they were in effect."""
_POINTS = ("run_id", "point_id", "process", "status", "requested", "effective", "tp", "batch",
           "effective.mode", "effective.comm", "hardware_fingerprint", "environment")  # fmt: skip
_METRICS = ("point_id", "process", "repeat", "name", "stat", "value", "phase", "ranks")


@dataclass(slots=True)
class Group:
    """Cells that differ in model, TP size, batch and lengths alone.

    Attributes:
        settings: of MODE; left_out: why further points are not among the cells.
    """

    settings: dict[str, Any]
    cells: list[Cell] = field(default_factory=list)

    @property
    def title(self) -> str:
        how = "CUDA graphs" if not self.settings["enforce_eager"] else "eager"
        kept = {k: v for k, v in self.settings.items() if k not in ("enforce_eager", "device")}
        named = ", ".join(f"{k}={v}" for k, v in kept.items())
        return f"{self.settings['device']}, {how}, {named}"


@dataclass(frozen=True, slots=True)
class Measured:
    """`notes`: what of the runs is no cell, and why."""

    groups: tuple[Group, ...]
    fingerprint: str
    notes: tuple[str, ...]


def measured(runs: Sequence[Path]) -> Measured:
    """The decode steps of all points that are ok.

    Raises:
        PredictionError: no cell, or runs of several machines.
        StoreError: a folder that cannot be read.
    """
    import pandas as pd

    points, metrics = [], []
    for run in runs:
        results = load(run)
        points.append(results.table("points", _POINTS))
        metrics.append(results.table("metrics", _METRICS))
    frame = pd.concat(points, ignore_index=True).drop_duplicates(["run_id", "point_id", "process"])
    steps = _steps(pd.concat(metrics, ignore_index=True))
    shapes: dict[str, ModelShape] = {}
    groups: dict[str, Group] = {}
    notes: dict[str, int] = {}
    for point_id, rows in frame.groupby("point_id", sort=False):
        first = rows.iloc[0]
        try:
            status = worst_status(rows["status"])  # of its fresh engines
            if status != "ok":
                raise PredictionError(f"status {status}")
            cell, settings = _cell(first, steps.get(str(point_id)), shapes)
        except (PredictionError, ConfigError) as error:
            notes[str(error)] = notes.get(str(error), 0) + 1
            continue
        groups.setdefault(json.dumps(settings, sort_keys=True), Group(settings)).cells.append(cell)
    said = tuple(f"{n} points left out: {reason}" for reason, n in notes.items())
    if not groups:
        raise PredictionError(f"no decode step to fit; {'; '.join(said) or 'the runs are empty'}")
    machine = _machine_of(frame[frame["status"] == "ok"])
    return Measured(tuple(groups.values()), machine, said)


def _machine_of(points: pd.DataFrame) -> str:
    """The fingerprint under which the machine's calibration is kept: where some runs saw a part of
    its GPUs (CUDA_VISIBLE_DEVICES), that of the runs that saw most. `points`: those that are ok,
    since a row of one that never ran, or whose job died, does not say what was there.

    Raises:
        PredictionError: they are several machines.
    """
    alike, gpus = {}, {}
    for _, row in points.drop_duplicates("hardware_fingerprint").iterrows():
        found = json.loads(row["environment"])
        key = row["hardware_fingerprint"]
        kinds = {(gpu["name"], gpu["memory_bytes"], gpu["driver"]): gpu for gpu in found["gpus"]}
        one_of_each = [gpu for _, gpu in sorted(kinds.items())]
        alike[key] = fingerprint({**found, "gpus": one_of_each})
        gpus[key] = len(found["gpus"])
    if len(set(alike.values())) > 1:
        raise PredictionError(
            f"runs of {len(set(alike.values()))} machines ({', '.join(sorted(alike))}): rates and "
            "collectives are one machine's; name runs of one"
        )
    return max(gpus, key=gpus.__getitem__)


def _steps(metrics: pd.DataFrame) -> dict[str, float]:
    """point_id -> median time of a clean decode step on the slowest rank, over fresh engines."""
    chosen = metrics[
        (metrics["name"] == "step_us") & (metrics["stat"] == "p50") & metrics["repeat"].isna()
        & (metrics["phase"] == "decode") & (metrics["ranks"] == "max") & metrics["value"].notna()
    ]  # fmt: skip
    medians = chosen.groupby("point_id")["value"].median()
    return {str(point_id): float(value) for point_id, value in medians.items()}


def _cell(
    row: pd.Series, step_us: float | None, shapes: dict[str, ModelShape]
) -> tuple[Cell, dict[str, Any]]:
    """Raises:
    PredictionError, ConfigError: the point is no cell; the text says why.
    """
    asked, effective = json.loads(row["requested"]), json.loads(row["effective"])
    work = asked["workload"]
    if NSYS in asked["instrument"]:
        raise PredictionError("it ran under nsys, whose times hold what that costs")
    if work["kind"] not in ("decode", "prefill"):
        raise PredictionError(f"workload={work['kind']}: the lengths of its steps vary")
    if step_us is None:
        raise PredictionError("no time of a clean decode step (instrument collectives gives it)")
    cell = Cell(
        model=asked["model"]["name"],
        shape=shape_of(asked["model"], shapes),
        tp=int(row["tp"]),
        batch=int(row["batch"]),
        prompt_tokens=work["prompt_tokens"],
        output_tokens=work["output_tokens"],
        dtype=effective["dtype"],
        path=None if int(row["tp"]) == 1 else row["effective.comm"],
        graph=str(row["effective.mode"]).startswith("graph"),
        compiled=effective["compile"] != "off",
        step_us=step_us,
    )
    return cell, {name: effective[name] for name in MODE}


def shape_of(model: dict[str, Any], known: dict[str, ModelShape] | None = None) -> ModelShape:
    """The shape of a resolved `model` section; `known` keeps what was read.

    Raises:
        ConfigError: it cannot be found here.
    """
    from harness.machine.models import resolve_model

    known = {} if known is None else known
    key = json.dumps(model, sort_keys=True)
    if key not in known:
        known[key] = ModelShape.from_hf(resolve_model(model))
    return known[key]
