"""Figures of the instrumented pass: collectives a step, transfer and waiting, shares, costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.comm.types import Kind, Site
from engine.shape import ModelShape
from harness.attribution import Joined, bandwidth, shares
from harness.figure_rows import FigureRows
from harness.records import PHASES
from harness.window import Window

SIZES = 16
"""Message sizes of one (phase, kind, site) that get figures of their own, the most frequent ones; a
trace has hundreds, all of which stand in the table of collectives."""

SOLO = "tp=1 has no collectives"


def instrumented_figures(
    rows: FigureRows, joined: Joined, clean: Sequence[Window], shape: ModelShape, pass_name: str
) -> None:
    """Everything that the joined records and the plain pass' clean steps give."""
    _counts(rows, joined, shape, pass_name)
    for record, floor, tick in zip(joined.records, joined.floor_us, joined.tick_us, strict=True):
        where: dict[str, Any] = {"pass_name": pass_name, "ranks": str(record.rank)}
        rows.add("floor_us", float(floor), n=1, **where)
        rows.add("tick_us", float(tick), n=1, **where)
    _latencies(rows, joined, pass_name)
    _per_step(rows, joined, pass_name)
    _shares(rows, joined, clean, pass_name)
    _instrument_cost(rows, joined, clean, pass_name)
    rows.add(
        "launch_gap_us", None, n=0, pass_name=pass_name, reason="needs the profiler pass"
    )  # fmt: skip


def without_records(rows: FigureRows, pass_name: str) -> None:
    """The nulls of a point whose collectives were not timed."""
    reason = "collectives were not timed (instrument)"
    for name in ("latency_us", "transfer_us", "wait_us"):
        rows.summarise(name, [], pass_name=pass_name, reason=reason)
    for name in ("comm_share", "transfer_share", "wait_share", "launch_gap_us"):
        rows.add(name, None, n=0, pass_name=pass_name, reason=reason)


def per_step(joined: Joined, values: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """[S] sums of `values` [N] over the chosen collectives of each step."""
    total = np.zeros(len(joined.steps))
    np.add.at(total, joined.step_index[chosen], values[chosen])
    return total


def _counts(rows: FigureRows, joined: Joined, shape: ModelShape, pass_name: str) -> None:
    ones = np.ones(len(joined.rows))
    sampling = joined.steps["samples"] > 0
    token_ids = joined.rows["site"] == Site.TOKEN_IDS
    counted = {
        "all_reduces_per_step": per_step(joined, ones, joined.is_kind(Kind.ALL_REDUCE)),
        "gathers_per_step": per_step(joined, ones, joined.is_kind(Kind.GATHER))[sampling],
        "token_ids_per_step": per_step(joined, ones, token_ids),
    }
    for name, values in counted.items():
        reason = None if len(values) else "no such step in the window"
        rows.summarise(name, values, pass_name=pass_name, source="count", reason=reason)
    expected = shape.expected_collectives(joined.world, True)
    all_reduces = sum(kind == Kind.ALL_REDUCE for kind, _ in expected)
    rows.add("expected_all_reduces_per_step", all_reduces, n=1, pass_name=pass_name, source="model")


def _latencies(rows: FigureRows, joined: Joined, pass_name: str) -> None:
    below = int((joined.latency_us < 0).sum())
    rows.add("below_floor", below, n=joined.latency_us.size, pass_name=pass_name, source="count")
    if joined.world == 1:
        for name in ("latency_us", "transfer_us", "wait_us"):
            rows.summarise(name, [], pass_name=pass_name, reason=SOLO)
        return
    tick = float(joined.tick_us.max())
    algbw, busbw = bandwidth(joined)
    for key, chosen in _groups(joined):
        phase, kind, site, size = key
        where: dict[str, Any] = {
            "pass_name": pass_name,
            "phase": PHASES[phase],
            "kind": Kind(kind).label,
            "site": Site(site).label,
            "bytes": size,
        }
        latency, wait = joined.latency_us[chosen], joined.wait_us[chosen]
        rooted = None if kind == Kind.ALL_REDUCE else "rooted"
        for ranks, of in (("min", np.min), ("max", np.max)):
            rows.summarise("latency_us", of(latency, axis=1), tick=tick, ranks=ranks, **where)
            waits = of(wait, axis=1) if rooted is None else np.zeros(0)
            rows.summarise("wait_us", waits, tick=tick, ranks=ranks, reason=rooted, **where)
        transfer = joined.transfer_us[chosen] if rooted is None else np.zeros(0)
        rows.summarise("transfer_us", transfer, tick=tick, reason=rooted, **where)
        for name, values in (("algbw_GBps", algbw[chosen]), ("busbw_GBps", busbw[chosen])):
            usable = values[~np.isnan(values)]
            reason = None if len(usable) else "no time above zero"
            rows.summarise(name, usable, reason=reason, **where)


def _groups(joined: Joined) -> list[tuple[tuple[int, int, int, int], np.ndarray]]:
    """((phase, kind, site, bytes), indices), at most SIZES sizes for each of the first three."""
    columns = [joined.phases(), joined.rows["kind"], joined.rows["site"], joined.rows["bytes"]]
    table = np.stack([c.astype(np.int64) for c in columns], axis=1)
    keys, inverse, counts = np.unique(table, axis=0, return_inverse=True, return_counts=True)
    taken: dict[tuple[int, ...], int] = {}
    chosen = []
    for group in np.argsort(-counts, kind="stable"):
        phase, kind, site, size = (int(v) for v in keys[group])
        seen = taken.get((phase, kind, site), 0)
        if seen < SIZES:
            taken[phase, kind, site] = seen + 1
            chosen.append(((phase, kind, site, size), np.flatnonzero(inverse.ravel() == group)))
    return sorted(chosen, key=lambda pair: pair[0])


def _per_step(rows: FigureRows, joined: Joined, pass_name: str) -> None:
    reduces = joined.is_kind(Kind.ALL_REDUCE)
    transfer = per_step(joined, joined.transfer_us, reduces)
    waits = [per_step(joined, joined.wait_us[:, r], reduces) for r in range(joined.world)]
    wait = np.stack(waits, axis=1)
    for code, phase in enumerate(PHASES):
        steps = joined.steps["phase"] == code
        reason = (
            SOLO if joined.world == 1 else None if steps.any() else "no such step in the window"
        )
        if reason is not None:
            steps = np.zeros_like(steps)
        where: dict[str, Any] = {"pass_name": pass_name, "phase": phase, "reason": reason}
        rows.summarise("transfer_us_per_step", transfer[steps], **where)
        rows.summarise("wait_us_per_step", wait[steps].min(axis=1), ranks="min", **where)
        rows.summarise("wait_us_per_step", wait[steps].max(axis=1), ranks="max", **where)


def _shares(rows: FigureRows, joined: Joined, clean: Sequence[Window], pass_name: str) -> None:
    logs = [np.concatenate([w.steps[r] for w in clean]) for r in range(joined.world)]
    for phase in (None, *range(len(PHASES))):
        chosen = np.ones(len(joined.rows), bool) if phase is None else joined.phases() == phase
        where: dict[str, Any] = {
            "pass_name": pass_name,
            "phase": None if phase is None else PHASES[phase],
        }
        n = int(chosen.sum())
        found = shares(joined, logs, phase)
        for name in ("comm_share", "transfer_share", "wait_share"):
            if found is None:
                reason = "no such step in one of the passes"
                rows.add(name, None, n=n, reason=reason, **where)
                continue
            per_rank = found[name]
            for rank, value in enumerate(per_rank):
                rows.add(name, float(value), n=n, ranks=str(rank), **where)
            rows.add(name, float(per_rank.min()), n=n, ranks="min", **where)
            rows.add(name, float(per_rank.max()), n=n, ranks="max", **where)


def _instrument_cost(
    rows: FigureRows, joined: Joined, clean: Sequence[Window], pass_name: str
) -> None:
    """Medians of the slowest rank's step, with and without the instruments."""
    counts = per_step(joined, np.ones(len(joined.rows)), np.ones(len(joined.rows), bool))
    for code, phase in enumerate(PHASES):
        steps = joined.steps["phase"] == code
        plain = np.concatenate([w.step_us(code) for w in clean]).max(axis=1)
        where: dict[str, Any] = {"pass_name": pass_name, "phase": phase}
        n = int(steps.sum())
        if n == 0 or len(plain) == 0:
            for name in ("instrument_us", "instrument_share"):
                rows.add(name, None, n=n, reason="no such step in one of the passes", **where)
            continue
        base = float(np.median(plain))
        extra = float(np.median(joined.step_us[steps].max(axis=1))) - base
        rows.add("instrument_share", extra / base, n=n, **where)
        each = float(np.median(counts[steps]))
        if each == 0:
            rows.add("instrument_us", None, n=n, reason=SOLO, **where)
        else:
            rows.add("instrument_us", extra / each, n=n, **where)
