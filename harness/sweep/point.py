"""One point: warm every shape, measure plain and with instruments, leave rows."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.machine import hardware
from harness.measuring import flags, gpu_state, pass_plan
from harness.measuring.failures import classify
from harness.measuring.stats import relative_noise
from harness.measuring.window import MeasurementError
from harness.rows import steps as step_rows
from harness.rows import tables
from harness.rows.figures import FigureRows
from harness.sweep.passes import Passes, Progress
from harness.tables.point_files import TableData, write_point

if TYPE_CHECKING:
    from harness.backends.base import Backend
    from harness.measuring.attribution import Joined
    from harness.planning.plan import Point

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PointOutcome:
    """`engine_alive`: whether the engine can be used for the next point; after an error that is not
    the harness's own it is taken for unusable."""

    status: str
    reason: str | None = None
    engine_alive: bool = True


def measure_point(
    backend: Backend,
    point: Point,
    out_dir: Path,
    progress: Progress = lambda text: None,
    process: int = 0,
) -> PointOutcome:
    """Measures a point on a started engine and writes its tables into `out_dir`, which stands at
    `<run>/points/<name>`. An exception becomes a row; only what ends the process gets out.

    Args:
        progress: called with a few words whenever something begins.
        process: which of the point's fresh engines this one is, from 0 (measure.n_process).
    """
    run_id = out_dir.parent.parent.name
    passes = Passes(backend, point, progress)
    rows = _Rows(passes, run_id, process)
    try:
        status, reason = passes.run()
        found = rows.measured(status, reason)
        outcome = PointOutcome(status, reason)
    except Exception as error:
        failure = classify(error)
        logger.warning("point %s: %s", point.point_id, failure.reason)
        alive = failure.engine_alive and isinstance(error, _own_errors())
        found = rows.failed(failure.status, failure.reason, failure.traceback)
        outcome = PointOutcome(failure.status, failure.reason, alive)
    backend.points_served += 1
    write_point(out_dir, found)
    return outcome


def status_only_tables(
    point: Point,
    status: str,
    reason: str | None,
    *,
    run_id: str,
    process: int = 0,
    environment: Mapping[str, Any] | None = None,
    effective: Mapping[str, Any] | None = None,
    traceback: str | None = None,
    **row: Any,
) -> dict[str, TableData]:
    """The tables of a point that was not measured: one row that says why. `row`: further columns of
    `points` that are known (started_at, wall_s, notes, ...)."""
    env = hardware.capture() if environment is None else environment
    full = tables.point_columns(point, run_id, env, effective)
    full |= {"process": process, "repeat": 0, "status": status, "reason": reason}
    full |= {"traceback": traceback, **row}
    return {"points": tables.columns("points", [full])}


def _own_errors() -> tuple[type[Exception], ...]:
    from harness.measuring.attribution import AttributionError
    from harness.measuring.trace import TraceError
    from harness.measuring.workload import WorkloadError

    return MeasurementError, AttributionError, WorkloadError, TraceError


class _Rows:
    """The tables of one point, from whatever its passes have measured."""

    def __init__(self, passes: Passes, run_id: str, process: int) -> None:
        self.passes, self.backend, self.cfg = passes, passes.backend, passes.cfg
        self.run_id = run_id
        self.key = {"run_id": run_id, "point_id": passes.point.point_id, "process": process}

    def measured(self, status: str, reason: str | None) -> dict[str, TableData]:
        found = self._evidence()
        found["phases"] = tables.phases(self.key, self.backend, self.cfg["cache"])
        found["memory"] = tables.memory(self.key, self.backend)
        figures = self._figures()
        found["metrics"] = figures.table()
        graphs = not self.backend.effective["enforce_eager"]
        self.passes.notes += flags.of_point(self.passes.plain, figures.rows, graphs)
        found["points"] = tables.columns("points", self._point_rows(status, reason, None))
        collectives = self._collectives()
        if collectives:
            found["collectives"] = tables.concatenated(collectives)
        return found

    def _collectives(self) -> list[TableData]:
        from harness.measuring.expected import expected_bytes

        passes, shape = self.passes, self.backend.shape
        timed = [(t.name, t.joined) for t in passes.timed if t.joined is not None]
        if passes.kernels is not None:
            timed.append((pass_plan.PROFILER, passes.kernels))
        return [
            tables.collectives(
                self.key, joined, expected_bytes(joined, shape), name, 0,
                kernels=joined is passes.kernels,
            )
            for name, joined in timed
        ]  # fmt: skip

    def failed(self, status: str, reason: str, traceback: str) -> dict[str, TableData]:
        """What a failed point leaves: its status, and the requests and steps as evidence; no figure
        that anyone could rank."""
        found = self._evidence()
        found["points"] = tables.columns("points", self._point_rows(status, reason, traceback))
        return found

    def _evidence(self) -> dict[str, TableData]:
        if not self.passes.windows:
            return {}
        mode = str(self.backend.effective["mode"])
        timed: dict[str, Joined] | None = {} if "step_us" in self.backend.lacks else None
        if self.backend.effective["device"] == "cuda":  # a backlog's spins lie inside its steps
            timed = {
                t.name: t.joined
                for t in self.passes.timed
                if t.joined is not None and t.name != pass_plan.BACKLOG
            }
        skews = {
            t.name: [rank["skew"] for rank in t.results if "skew" in rank]
            for t in self.passes.timed
        }
        return {
            "requests": tables.requests(self.key, self.passes.windows),
            "steps": step_rows.steps(
                self.key, self.passes.windows, mode, timed, skews, self.passes.profiles
            ),
            "telemetry": tables.telemetry(self.key, self.passes.windows),
        }

    def _point_rows(
        self, status: str, reason: str | None, traceback: str | None
    ) -> list[dict[str, Any]]:
        fixed = tables.point_columns(
            self.passes.point, self.run_id, hardware.capture(), _effective(self.backend)
        )
        fixed |= {
            "process": self.key["process"],
            "status": status,
            "reason": reason,
            "traceback": traceback,
            "notes": "; ".join(self.passes.notes) or None,
            "stop_reason": self.passes.stop_reason,
            "rel_noise": relative_noise([w.output_tok_s for w in self.passes.plain]),
        }
        if not self.passes.plain:
            return [{**fixed, "repeat": 0}]
        gpus = gpu_state.of_engine(self.backend.effective)
        return [
            {**fixed, **tables.window_columns(w), **gpu_state.columns(w, gpus)}
            for w in self.passes.plain
        ]

    def _figures(self) -> FigureRows:
        from harness.calibration.file import ceilings
        from harness.rows import collectives as collective_figures
        from harness.rows import costs, metrics
        from harness.rows import device as device_figures

        rows = FigureRows(self.key, lacks=self.backend.lacks)
        passes, shape = self.passes, self.backend.shape
        tp, device = self.cfg["tp"], str(self.backend.effective["device"])
        clean, latency = passes.clean, passes.latency
        measured = ceilings(self.cfg["results_dir"]) if device == "cuda" else None
        metrics.plain_figures(rows, passes.plain, tp=tp, device=device, clean=clean)
        metrics.energy_figure(rows, passes.plain, gpu_state.of_engine(self.backend.effective))
        costs.cost_figures(rows, clean, self.cfg, self.backend, measured)
        pass_name = pass_plan.HOST if latency is None else latency[0]
        if latency is None:
            collective_figures.without_records(rows, pass_name)
            for timed in passes.timed:
                if timed.joined is None and "counts" in timed.results[0]:
                    counts, log = timed.results[0]["counts"], timed.window.steps[0]
                    collective_figures.counted_figures(rows, counts, log, shape, timed.name)
        else:
            collective_figures.instrumented_figures(rows, latency[1], clean, shape, pass_name)
            self._instrument_cost(rows)
        device_figures.launch_gap(rows, passes.profiles, pass_name)
        if device != "cuda":
            return rows
        if latency is not None:
            device_figures.quality_figures(rows, latency[1], pass_name)
        for timed in passes.timed:
            if timed.joined is not None and timed.joined.span.any():
                device_figures.span_figures(rows, timed.joined, timed.name)
        if passes.kernels is not None:
            own = None if latency is None else latency[1]
            device_figures.kernel_figures(rows, passes.kernels, own)
        return rows

    def _instrument_cost(self, rows: FigureRows) -> None:
        """Of the pass that gave the latencies; a backlog's steps hold its spins, so that the pass
        without it tells what the same readings cost."""
        from harness.rows.collectives import instrument_cost

        passes = self.passes
        found = passes.joined(pass_plan.SPAN) or passes.latency
        assert found is not None
        name, joined = found
        if name == pass_plan.GRAPH:
            joined = joined.timed()
        instrument_cost(rows, joined, passes.step_times(name, joined), passes.clean)


def _effective(backend: Backend) -> dict[str, Any] | None:
    try:
        return backend.effective
    except Exception:  # an engine that is gone tells nothing; the row is written without it
        return None
