"""Which passes with instruments a point has, from its configuration and the engine's mode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness import observers
from harness.measuring.window import MeasurementError

if TYPE_CHECKING:
    from engine.comm.types import ObserverFactory

HOST, STEP, GRAPH, BACKLOG, SPAN, SKEW, PROFILER, NSYS = (
    "host", "step", "graph_timed", "backlog", "span", "skew", "profiler", "nsys"
)  # fmt: skip
LATENCY = (HOST, GRAPH, BACKLOG)
"""Passes whose pairs are latencies; a point has one of them."""


@dataclass(frozen=True, slots=True)
class TimedPass:
    """One pass.

    Attributes:
        factories: by name, in the order to attach them.
        spans: whose pairs hold launch gaps: none, launched (steps that are no replays) or all.
        warm: whether the workload runs once with the instruments before it counts: graphs with
            observers inside are captured when a bucket is first used.
    """

    name: str
    factories: dict[str, ObserverFactory]
    spans: str = "none"
    warm: bool = False


def plan(cfg: Mapping[str, Any], effective: Mapping[str, Any]) -> tuple[list[TimedPass], list[str]]:
    """-> (passes in order, notes on what was left out).

    Raises:
        MeasurementError: a GPU's clock is asked for on a CPU.
    """
    wanted, notes = list(cfg["instrument"]), []
    missing = observers.nvtx_missing()
    for name in ("nvtx", "nsys"):
        if missing and name in wanted:
            wanted.remove(name)
            notes.append(f"instrument {name} left out: {missing}")
    on_gpu, timing = effective.get("device") == "cuda", cfg["timing"]
    if not on_gpu:
        if "collectives" in wanted and timing != "host":
            raise MeasurementError(
                f"timing={timing}: the engine runs on a CPU, where only the host's clock can time "
                "it; set timing=host"
            )
        for name in ("profiler", "nsys"):
            if name in wanted:
                wanted.remove(name)
                notes.append(f"instrument {name} left out: it reads a GPU's kernels")
    elif "collectives" in wanted and timing == "host":
        wanted.remove("collectives")
        notes.append(
            "instrument collectives left out: on a GPU the host's clock times the launch, "
            "not the collective"
        )
    profiler, skewed, nsys = (name in wanted for name in ("profiler", "skew", "nsys"))
    timed = "collectives" in wanted
    wanted = [name for name in wanted if name not in ("profiler", "skew", "nsys")]
    passes = []
    if on_gpu and "collectives" in wanted:
        solo = effective["tp"] == 1
        passes = _on_gpu(cfg, str(effective["mode"]), solo, wanted)
        wanted = [name for name in wanted if solo and name != "collectives"]
    if wanted:
        passes.append(TimedPass(HOST, observers.factories(wanted)))
    if skewed and (effective["tp"] == 1 or not timed):
        notes.append("instrument skew left out: it needs tp above 1 and instrument collectives")
    elif skewed:
        passes.append(_skew(cfg, str(effective["mode"]), on_gpu))
    if profiler:
        passes.append(TimedPass(PROFILER, {"profiler": observers.ProfilerObserver}))
    if nsys:
        capture: dict[str, ObserverFactory] = {"capture": observers.CaptureObserver}
        passes.append(TimedPass(NSYS, capture | {"nvtx": observers.NvtxObserver}))
        notes.append("nsys was attached: times of the host hold what it costs")
    return passes, notes


def _skew(cfg: Mapping[str, Any], mode: str, on_gpu: bool) -> TimedPass:
    """As the pass that gives the latencies, with one rank delayed."""
    measure = cfg["measure"]
    skew = observers.Skew(measure["skew_rank"], tuple(measure["skew_us"]))
    timer = observers.factories(["collectives"], cfg["timing"])
    if not on_gpu:
        return TimedPass(SKEW, {"skew": skew, **timer})
    if mode.startswith("graph"):
        return TimedPass(SKEW, {"skew": skew, **timer}, spans="launched", warm=True)
    held = observers.Backlog(measure["backlog_us"], measure["backlog_layers"])
    return TimedPass(SKEW, {"backlog": held, "skew": skew, **timer}, warm=True)


def _on_gpu(cfg: Mapping[str, Any], mode: str, solo: bool, wanted: list[str]) -> list[TimedPass]:
    """The clean step, then collectives: in the graphs of steps, or behind a backlog and, for what
    the user waits for, without. One rank has no collectives; its step pass shows that."""
    step = TimedPass(STEP, {"collectives": observers.Stamp(collectives=solo)}, warm=True)
    if solo:
        return [step]
    timed = observers.factories(wanted, cfg["timing"])
    if mode.startswith("graph"):
        return [step, TimedPass(GRAPH, timed, spans="launched", warm=True)]
    measure = cfg["measure"]
    held = observers.Backlog(measure["backlog_us"], measure["backlog_layers"])
    alone = {"collectives": timed["collectives"]}
    return [
        step,
        TimedPass(BACKLOG, {"backlog": held, **timed}, warm=True),
        TimedPass(SPAN, alone, spans="all", warm=True),
    ]
