"""Figures of collectives: how many a step, transfer and waiting, shares, costs."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.comm.types import Kind, Site
from engine.shape import ModelShape
from harness.measuring.attribution import Joined, bandwidth, shares
from harness.measuring.step_times import StepTimes
from harness.observers.records import PHASES, CountRecord
from harness.rows.figures import FigureRows

SIZES = 16
"""Message sizes of one (phase, kind, site) that get figures of their own, the most frequent ones; a
trace has hundreds, all of which stand in the table of collectives."""

SOLO = "tp=1 has no collectives"
NO_STEP = "no such step in one of the passes"
NO_CLEAN = "no clean step time on this device without the step pass"


def instrumented_figures(
    rows: FigureRows, joined: Joined, clean: StepTimes | None, shape: ModelShape, pass_name: str
) -> None:
    """Everything that the joined records and the clean steps give. Steps that starved, and spans,
    are not looked at."""
    joined = joined.timed()
    _counts(rows, joined, shape, pass_name)
    for record, tick in zip(joined.records, joined.tick_us, strict=True):
        where = _where(joined, pass_name, ranks=str(record.rank))
        floor = joined.floor_us[:1, record.rank]
        reason = None if len(floor) else "no step was timed"
        rows.add("floor_us", float(floor[0]) if len(floor) else None, n=1, reason=reason, **where)
        rows.add("tick_us", float(tick), n=1, **where)
    _latencies(rows, joined, pass_name)
    _per_step(rows, joined, pass_name)
    _shares(rows, joined, clean, pass_name)


def without_records(rows: FigureRows, pass_name: str) -> None:
    """The nulls of a point whose collectives were not timed."""
    reason = "collectives were not timed (instrument)"
    for name in ("latency_us", "transfer_us", "wait_us"):
        rows.summarise(name, [], pass_name=pass_name, reason=reason)
    for name in ("comm_share", "transfer_share", "wait_share"):
        rows.add(name, None, n=0, pass_name=pass_name, reason=reason)


def _where(joined: Joined, pass_name: str, **more: Any) -> dict[str, Any]:
    return {"pass_name": pass_name, "source": joined.source, **more}


def per_step(joined: Joined, values: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """[S] sums of `values` [N] over the chosen collectives of each step."""
    total = np.zeros(len(joined.steps))
    np.add.at(total, joined.step_index[chosen], values[chosen])
    return total


def counted_figures(
    rows: FigureRows, record: CountRecord, log: np.ndarray, shape: ModelShape, pass_name: str
) -> None:
    """Collectives a step of a pass that counted them and timed none, over the steps of `log` that
    were no replays: nothing is heard of what a graph repeats."""
    steps = log[~log["replayed"]]
    counts = [record.steps[int(number)] for number in steps["step"]]

    def of(kind: Kind, *sites: Site) -> np.ndarray:
        wanted = [(kind.label, site.label) for site in sites or tuple(Site)]
        return np.array([sum(c[key][0] for key in wanted if key in c) for c in counts], float)

    per_step = of(Kind.ALL_REDUCE), of(Kind.GATHER), of(Kind.BROADCAST, Site.TOKEN_IDS)
    _per_step_counts(rows, *per_step, steps["samples"] > 0, record.world, shape, pass_name)


def _counts(rows: FigureRows, joined: Joined, shape: ModelShape, pass_name: str) -> None:
    ones = np.ones(len(joined.rows))
    token_ids = joined.rows["site"] == Site.TOKEN_IDS
    _per_step_counts(
        rows,
        per_step(joined, ones, joined.is_kind(Kind.ALL_REDUCE)),
        per_step(joined, ones, joined.is_kind(Kind.GATHER)),
        per_step(joined, ones, token_ids),
        joined.steps["samples"] > 0,
        joined.world,
        shape,
        pass_name,
    )


def _per_step_counts(
    rows: FigureRows,
    all_reduces: np.ndarray,
    gathers: np.ndarray,
    token_ids: np.ndarray,
    sampling: np.ndarray,
    world: int,
    shape: ModelShape,
    pass_name: str,
) -> None:
    """All [S], one value a step."""
    counted = {
        "all_reduces_per_step": all_reduces,
        "gathers_per_step": gathers[sampling],
        "token_ids_per_step": token_ids,
    }
    for name, values in counted.items():
        reason = None if len(values) else "no such step in the window"
        rows.summarise(name, values, pass_name=pass_name, source="count", reason=reason)
    expected = shape.expected_collectives(world, True)
    wanted = sum(kind == Kind.ALL_REDUCE for kind, _ in expected)
    rows.add("expected_all_reduces_per_step", wanted, n=1, pass_name=pass_name, source="model")


def _latencies(rows: FigureRows, joined: Joined, pass_name: str) -> None:
    below = int((joined.latency_us < 0).sum())
    rows.add("below_floor", below, n=joined.latency_us.size, pass_name=pass_name, source="count")
    if joined.world == 1:
        for name in ("latency_us", "transfer_us", "wait_us"):
            rows.summarise(name, [], reason=SOLO, **_where(joined, pass_name))
        return
    tick = float(joined.tick_us.max())
    algbw, busbw = bandwidth(joined)
    for key, chosen in groups(joined):
        kind = key[1]
        where = _where(joined, pass_name, **labels(key))
        latency, wait = joined.latency_us[chosen], joined.wait_us[chosen]
        # The shortest wait is 0 by its definition, which no timer is too coarse for.
        for ranks, of, wait_tick in (("min", np.min, 0.0), ("max", np.max, tick)):
            rows.summarise("latency_us", of(latency, axis=1), tick=tick, ranks=ranks, **where)
            if kind == Kind.ALL_REDUCE:
                rows.summarise("wait_us", of(wait, axis=1), tick=wait_tick, ranks=ranks, **where)
        transfer = joined.transfer_us[chosen]
        if kind == Kind.ALL_REDUCE:
            rows.summarise("transfer_us", transfer, tick=tick, **where)
        elif joined.calibrated[chosen].all():
            where_root = {**where, "source": "calibrated"}
            rows.add("transfer_us", float(transfer[0]), stat="mean", n=1, **where_root)
            rows.summarise("wait_us", wait[:, 0], tick=tick, ranks="0", **where)
        else:
            for name in ("transfer_us", "wait_us"):
                rows.summarise(name, np.zeros(0), reason="rooted", **where)
        for name, values in (("algbw_GBps", algbw[chosen]), ("busbw_GBps", busbw[chosen])):
            usable = values[~np.isnan(values)]
            reason = None if len(usable) else "no time above zero that is the sum's alone"
            rows.summarise(name, usable, reason=reason, **where)


def labels(key: tuple[int, int, int, int]) -> dict[str, Any]:
    """(phase, kind, site, bytes) as the metrics table names them."""
    phase, kind, site, size = key
    return {
        "phase": PHASES[phase],
        "kind": Kind(kind).label,
        "site": Site(site).label,
        "bytes": size,
    }


def groups(joined: Joined) -> list[tuple[tuple[int, int, int, int], np.ndarray]]:
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
        where = _where(joined, pass_name, phase=phase, reason=reason)
        rows.summarise("transfer_us_per_step", transfer[steps], **where)
        rows.summarise("wait_us_per_step", wait[steps].min(axis=1), ranks="min", **where)
        rows.summarise("wait_us_per_step", wait[steps].max(axis=1), ranks="max", **where)


def _shares(rows: FigureRows, joined: Joined, clean: StepTimes | None, pass_name: str) -> None:
    for phase in (None, *range(len(PHASES))):
        chosen = np.ones(len(joined.rows), bool) if phase is None else joined.phases() == phase
        where = _where(joined, pass_name, phase=None if phase is None else PHASES[phase])
        n = int(chosen.sum())
        found = None if clean is None else shares(joined, clean, phase)
        for name in ("comm_share", "transfer_share", "wait_share"):
            if found is None:
                reason = NO_STEP if clean is not None else NO_CLEAN
                rows.add(name, None, n=n, reason=reason, **where)
                continue
            per_rank = found[name]
            for rank, value in enumerate(per_rank):
                rows.add(name, float(value), n=n, ranks=str(rank), **where)
            rows.add(name, float(per_rank.min()), n=n, ranks="min", **where)
            rows.add(name, float(per_rank.max()), n=n, ranks="max", **where)


def instrument_cost(
    rows: FigureRows, joined: Joined, times: StepTimes, clean: StepTimes | None
) -> None:
    """What the instruments of a pass add to a step: medians with and without them of the shortest
    rank's step, which waits least for the others. (On two H200s the longest holds 100 to 300 us of
    waiting for the other host, which differ from pass to pass by more than all readings cost: it
    gave -0.9 to 5.4 us a collective where this gives 2.6 to 2.9.) `times` are of the pass's steps,
    between the same two points as those of `clean`: on a CPU the engine's step log has both, on a
    GPU the step's stamps."""
    counts = per_step(joined, np.ones(len(joined.rows)), np.ones(len(joined.rows), bool))
    for code, phase in enumerate(PHASES):
        each = counts[joined.steps["phase"] == code]
        timed = times.of(code).min(axis=1, initial=np.inf)
        plain = np.zeros(0) if clean is None else clean.of(code).min(axis=1, initial=np.inf)
        where = _where(joined, times.pass_name, phase=phase)
        n = len(timed)
        if not (n and len(each) and len(plain)):
            reason = NO_STEP if clean is not None else NO_CLEAN
            for name in ("instrument_us", "instrument_share"):
                rows.add(name, None, n=n, reason=reason, **where)
            continue
        base = float(np.median(plain))
        extra = float(np.median(timed)) - base
        rows.add("instrument_share", extra / base, n=n, **where)
        count = float(np.median(each))
        if count == 0:
            rows.add("instrument_us", None, n=n, reason=SOLO, **where)
        else:
            rows.add("instrument_us", extra / count, n=n, **where)
