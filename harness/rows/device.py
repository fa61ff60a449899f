"""Figures that only a GPU has: spans, CUPTI's kernels beside the stamps, what starved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from harness.measuring.attribution import Joined
from harness.measuring.pass_plan import PROFILER
from harness.observers.records import DECODE, PHASES, ProfileRecord
from harness.rows.collectives import groups, labels
from harness.rows.figures import FigureRows

_NO_BIAS = "no run knows it of itself; +experiment=rank_skew shows it at zero delay, as wait_0_us"
_NO_GAP = "instrument profiler or python -m harness profile measures it"


def span_figures(rows: FigureRows, joined: Joined, pass_name: str) -> None:
    """Pairs with the host's launch gaps in them, of steps that were launched without a backlog."""
    joined = joined.only(joined.span)
    for key, chosen in groups(joined):
        pairs = joined.pair_us[chosen]
        for ranks, values in (("min", pairs.min(axis=1)), ("max", pairs.max(axis=1))):
            rows.summarise(
                "span_us", values, pass_name=pass_name, source=joined.source, ranks=ranks,
                tick=float(joined.tick_us.max()), **labels(key),
            )  # fmt: skip


def quality_figures(rows: FigureRows, joined: Joined, pass_name: str) -> None:
    """What a reader must know of the pass that gave the latencies."""
    where = {"pass_name": pass_name, "source": joined.source}
    starved = int(joined.starved.sum())
    rows.add("starved_steps", starved, n=len(joined.steps), pass_name=pass_name, source="count")
    rows.add("transfer_bias_us", None, n=0, reason=_NO_BIAS, **where)


def launch_gap(rows: FigureRows, profiles: Sequence[ProfileRecord], pass_name: str) -> None:
    """Time of a decode step in which no kernel runs, by CUPTI; without profiles null, in the pass
    `pass_name`. The first profiled step is left out: there ranks wait for each other's profilers.
    """
    if not profiles:
        rows.add("launch_gap_us", None, n=0, pass_name=pass_name, reason=_NO_GAP)
        return
    idle = np.stack([p.splits["idle_ns"][1:] / 1e3 for p in profiles], axis=1)
    reason = None if len(idle) else "one profiled step alone, which is left out"
    for ranks, values in (("min", idle.min(axis=1)), ("max", idle.max(axis=1))):
        rows.summarise(
            "launch_gap_us", values, pass_name=PROFILER, source="cupti", phase=PHASES[DECODE],
            ranks=ranks, reason=reason,
        )  # fmt: skip


def kernel_times(rows: FigureRows, kernels: Joined, pass_name: str) -> None:
    """What CUPTI says of each site's kernels, waiting included."""
    for key, chosen in groups(kernels):
        times = kernels.latency_us[chosen]
        for ranks, values in (("min", times.min(axis=1)), ("max", times.max(axis=1))):
            rows.summarise(
                "kernel_us", values, pass_name=pass_name, source=kernels.source, ranks=ranks,
                **labels(key),
            )  # fmt: skip


def kernel_figures(rows: FigureRows, kernels: Joined, latency: Joined | None) -> None:
    """CUPTI's times, and site by site how far the latencies of decode steps lie above them."""
    kernel_times(rows, kernels, PROFILER)
    if latency is None:
        return
    latency = latency.timed()
    decode = latency.only(latency.steps["phase"] == DECODE)
    pairs = {(int(r["kind"]), int(r["site"]), int(r["bytes"])) for r in kernels.rows}
    for kind, site, size in sorted(pairs):
        a, b = of_site(decode, kind, site, size), of_site(kernels, kind, site, size)
        where = labels((DECODE, kind, site, size))
        disagreement(rows, a, b, pass_name=PROFILER, source=kernels.source, **where)


def disagreement(rows: FigureRows, latency: np.ndarray, kernels: np.ndarray, **where: Any) -> None:
    """How far latencies [M, R] of a site lie above its kernels' times [N, R]: the difference of the
    two passes' medians, of each rank and of the minimum over ranks. Waiting is not the same in two
    passes (behind a backlog there is none), so it is the minimum, which holds none of it, that says
    whether the two methods agree."""
    of_ranks = {str(rank): (latency[:, rank], kernels[:, rank]) for rank in range(kernels.shape[1])}
    of_ranks["min"] = latency.min(axis=1, initial=np.inf), kernels.min(axis=1)
    for ranks, (stamps, times) in of_ranks.items():
        value = reason = None
        if len(latency):
            value = float(np.median(stamps) - np.median(times))
        else:
            reason = "no such collective in the pass that gave the latencies"
        n = min(len(latency), len(kernels))
        rows.add("stamp_vs_cupti_us", value, n=n, ranks=ranks, reason=reason, **where)


def of_site(joined: Joined, kind: int, site: int, size: int) -> np.ndarray:
    """[N, R] latency_us of the collectives of one kind, site and size."""
    rows = joined.rows
    same = (rows["kind"] == kind) & (rows["site"] == site) & (rows["bytes"] == size)
    return joined.latency_us[same]
