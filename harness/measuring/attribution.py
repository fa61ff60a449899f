"""Ranks' records joined collective by collective, and what is transfer and what is waiting.

Each rank keeps its own rows; two rows are one collective if (step, ordinal) agree within one pass.
Everything is in microseconds, less the timer's floor, and nothing is clamped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from engine.comm.fused import FUSED
from engine.comm.types import Kind, Site
from harness.measuring.roofline import bus_factor
from harness.measuring.step_times import StepTimes
from harness.observers.records import PHASES, BacklogRecord, RankRecord

_LAYER_SITES = (Site.ATTN_O_PROJ, Site.MLP_DOWN_PROJ)


class AttributionError(RuntimeError):
    """Records that do not belong together, or not to this model; a figure made of them would be
    wrong, so there is none."""


@dataclass(frozen=True, slots=True)
class Joined:
    """One instrumented pass. N collectives, S steps, R ranks; NaN where a value does not exist.

    Attributes:
        rows: [N] of rank 0, ordered by (step, ordinal); all ranks have its kind, site and bytes.
        step_index: [N] index into `steps` of each row's step.
        layer: [N] decoder layer, -1 outside the layers.
        pair_us: [N, R] as read.
        latency_us: [N, R] pair_us less floor_us; NaN in spans and in starved steps.
        transfer_us: [N] all_reduce: minimum over ranks. Rooted kinds (gather, broadcast): what
            the root needed for this size when the ranks began together (`calibrated`), else NaN: a
            sender may have sent before the others arrive.
        calibrated: [N] bool.
        wait_us: [N, R] latency_us - transfer_us; of rooted kinds at the root alone.
        steps: [S] of rank 0; step_us: [S, R]; floor_us: [S, R].
        span: [S] bool: launched without a backlog, so that its pairs hold the host's launch gaps.
        starved: [S] bool: the backlog of some rank was too short.
    """

    rows: np.ndarray
    step_index: np.ndarray
    layer: np.ndarray
    pair_us: np.ndarray
    latency_us: np.ndarray
    transfer_us: np.ndarray
    calibrated: np.ndarray
    wait_us: np.ndarray
    steps: np.ndarray
    step_us: np.ndarray
    floor_us: np.ndarray
    tick_us: np.ndarray
    span: np.ndarray
    starved: np.ndarray
    records: tuple[RankRecord, ...]

    @property
    def world(self) -> int:
        return len(self.records)

    @property
    def source(self) -> str:
        return self.records[0].source

    @property
    def replayed(self) -> np.ndarray:
        """[S] bool."""
        return _replayed(self.records[0], self.steps)

    def only(self, steps: np.ndarray) -> Joined:
        """The steps of a mask [S] alone, with their collectives."""
        rows = steps[self.step_index]
        return replace(
            self,
            rows=self.rows[rows],
            step_index=(np.cumsum(steps) - 1)[self.step_index[rows]],
            layer=self.layer[rows],
            pair_us=self.pair_us[rows],
            latency_us=self.latency_us[rows],
            transfer_us=self.transfer_us[rows],
            calibrated=self.calibrated[rows],
            wait_us=self.wait_us[rows],
            steps=self.steps[steps],
            step_us=self.step_us[steps],
            floor_us=self.floor_us[steps],
            span=self.span[steps],
            starved=self.starved[steps],
        )

    def timed(self) -> Joined:
        """The steps whose collectives have a latency."""
        return self.only(~self.span & ~self.starved)

    def is_kind(self, kind: Kind) -> np.ndarray:
        """[N] bool."""
        return self.rows["kind"] == kind

    def phases(self) -> np.ndarray:
        """[N] phase code of each collective's step."""
        return self.steps["phase"][self.step_index]


def join(
    records: Sequence[RankRecord], *, spans: str = "none", backlogs: Sequence[BacklogRecord] = ()
) -> Joined:
    """Joins the ranks' records, in whatever order the rows and ranks come.

    Args:
        spans: which steps' pairs are spans: none, launched (those that are no replays) or all.
        backlogs: of the ranks; a step that starved on one of them is starved.

    Raises:
        AttributionError: a rank is missing or lacks a row, or kind, site, bytes, dtype, or the
            step's phase or tokens differ; the text names step, ordinal and rank.
    """
    ranks = tuple(sorted(records, key=lambda r: r.rank))
    if not ranks or [r.rank for r in ranks] != list(range(ranks[0].world)):
        raise AttributionError(
            f"records of ranks {[r.rank for r in ranks]}: each of the ranks must hand over one"
        )
    steps = [np.sort(r.steps, order="step", kind="stable") for r in ranks]
    rows = [np.sort(r.collectives, order=["step", "ordinal"], kind="stable") for r in ranks]
    for rank in range(len(ranks)):
        _check_steps(rank, steps[0], steps[rank])
        _check_rows(rank, ranks, rows[0], rows[rank])
    step_index = np.searchsorted(steps[0]["step"], rows[0]["step"])
    known = np.zeros(len(rows[0]), bool)
    inside = step_index < len(steps[0])
    known[inside] = steps[0]["step"][step_index[inside]] == rows[0]["step"][inside]
    if not known.all():
        first = rows[0][np.argmin(known)]
        raise AttributionError(
            f"step {first['step']}, ordinal {first['ordinal']}: a collective of a step that was "
            "not recorded"
        )
    replayed = _replayed(ranks[0], steps[0])
    span = {"none": replayed & False, "launched": ~replayed, "all": replayed | True}[spans]
    starved = np.isin(
        steps[0]["step"], np.concatenate([np.zeros(0), *(b.steps[b.starved] for b in backlogs)])
    )
    floor_us = np.stack([_floor_us(r, replayed) for r in ranks], axis=1)
    pair = np.stack([(r["after_ns"] - r["before_ns"]) / 1e3 for r in rows], axis=1)
    without = (span | starved)[step_index]
    latency = np.where(without[:, None], np.nan, pair - floor_us[step_index])
    rooted = rows[0]["kind"] != Kind.ALL_REDUCE
    aligned = np.where(without, np.nan, _aligned_us(ranks[0], rows[0]))
    transfer = np.where(rooted, aligned, latency.min(axis=1, initial=np.inf))
    wait = latency - transfer[:, None]
    wait[rooted, 1:] = np.nan
    return Joined(
        rows=rows[0],
        step_index=step_index,
        layer=_layers(rows[0]),
        pair_us=pair,
        latency_us=latency,
        transfer_us=transfer,
        calibrated=rooted & ~np.isnan(aligned),
        wait_us=wait,
        steps=steps[0],
        step_us=np.stack([(s["end_ns"] - s["begin_ns"]) / 1e3 for s in steps], axis=1),
        floor_us=floor_us,
        tick_us=np.array([r.tick_ns / 1e3 for r in ranks]),
        span=span,
        starved=starved,
        records=ranks,
    )


def _replayed(record: RankRecord, steps: np.ndarray) -> np.ndarray:
    graphs = np.array([*(name.startswith("graph") for name in record.modes), False])
    return graphs[np.minimum(steps["mode"], len(record.modes))]


def _floor_us(record: RankRecord, replayed: np.ndarray) -> np.ndarray:
    inside = record.floor_ns if record.graph_floor_ns is None else record.graph_floor_ns
    return np.where(replayed, inside, record.floor_ns) / 1e3


def _aligned_us(root: RankRecord, rows: np.ndarray) -> np.ndarray:
    """[N] of the root's aligned run of the same kind and size; NaN where there was none."""
    found = np.full(len(rows), np.nan)
    for (kind, size), ns in root.rooted_ns.items():
        found[(rows["kind"] == kind) & (rows["bytes"] == size)] = ns / 1e3
    return found


def _check_steps(rank: int, first: np.ndarray, other: np.ndarray) -> None:
    if len(np.unique(other["step"])) != len(other):
        raise AttributionError(f"rank {rank} recorded a step twice")
    if not np.array_equal(first["step"], other["step"]):
        odd = np.setxor1d(first["step"], other["step"])[0]
        where = "lacks" if odd in first["step"] else "alone has"
        raise AttributionError(f"step {odd}: rank {rank} {where} it")
    for name in ("phase", "batch", "tokens", "bucket", "samples"):
        differs = first[name] != other[name]
        if differs.any():
            at = int(np.argmax(differs))
            raise AttributionError(
                f"step {first['step'][at]}: {name} is {first[name][at]} on rank 0 and "
                f"{other[name][at]} on rank {rank}"
            )


def _check_rows(
    rank: int, ranks: Sequence[RankRecord], first: np.ndarray, other: np.ndarray
) -> None:
    keys = [
        list(zip(r["step"].tolist(), r["ordinal"].tolist(), strict=True)) for r in (first, other)
    ]
    if len(set(keys[1])) != len(keys[1]):
        raise AttributionError(f"rank {rank} recorded a (step, ordinal) twice")
    if keys[0] != keys[1]:
        step, ordinal = min(set(keys[0]) ^ set(keys[1]))
        where = "lacks" if (step, ordinal) in set(keys[0]) else "alone has"
        raise AttributionError(f"step {step}, ordinal {ordinal}: rank {rank} {where} this row")
    own_dtypes, dtypes = np.array(ranks[0].dtypes), np.array(ranks[rank].dtypes)
    for name in ("kind", "site", "bytes", "dtype"):
        a, b = first[name], other[name]
        if name == "dtype" and len(first):
            a, b = own_dtypes[a], dtypes[b]
        if not np.array_equal(a, b):
            at = int(np.argmax(a != b))
            show = {"kind": lambda v: Kind(v).label, "site": lambda v: Site(v).label}.get(name, str)
            raise AttributionError(
                f"step {first['step'][at]}, ordinal {first['ordinal'][at]}: {name} is "
                f"{show(a[at])} on rank 0 and {show(b[at])} on rank {rank}"
            )
    unfinished = other["after_ns"] == 0
    if unfinished.any():
        row = other[np.argmax(unfinished)]
        raise AttributionError(
            f"step {row['step']}, ordinal {row['ordinal']}: did not end on rank {rank}"
        )


def _layers(rows: np.ndarray) -> np.ndarray:
    """Each layer has two all-reduces, so the k-th of them in a step is of layer k // 2 (with the
    embedding's at ordinal 0 that is (ordinal - 1) // 2)."""
    in_layer = np.isin(rows["site"], [int(s) for s in _LAYER_SITES])
    before: np.ndarray = (
        np.cumsum(in_layer) - in_layer
    )  # rows of layers before this one, in all steps
    starts = np.concatenate([[True], rows["step"][1:] != rows["step"][:-1]])[: len(rows)]
    base = np.maximum.accumulate(np.where(starts, before, 0))
    return np.where(in_layer, (before - base) // 2, -1)


def bandwidth(joined: Joined) -> tuple[np.ndarray, np.ndarray]:
    """([N] algbw, [N] busbw) in GB/s; NaN where the time is not above zero or holds a norm too.

    all_reduce: bytes / transfer_us, busbw x 2(n-1)/n; gather: bytes / latency_us at the root,
    busbw x (n-1)/n; broadcast: the same at the root, busbw = algbw (nccl-tests' definitions).
    """
    rooted = ~joined.is_kind(Kind.ALL_REDUCE)
    time_us = np.where(rooted, joined.latency_us[:, 0], joined.transfer_us)
    normed = np.array([*(path == FUSED for path in joined.records[0].paths), False])
    usable = np.where((time_us > 0) & ~normed[joined.rows["path"]], time_us, np.nan)
    algbw = joined.rows["bytes"] / usable / 1e3
    factors = np.array([bus_factor(kind, joined.world) for kind in Kind])
    return algbw, algbw * factors[joined.rows["kind"]]


def shares(joined: Joined, clean: StepTimes, phase: int | None) -> dict[str, np.ndarray] | None:
    """Shares of communication in the clean step time, per rank.

    Args:
        clean: steps of a pass without instruments on collectives.
        phase: of the steps to look at; None: all, each phase weighed by its own clean mean.

    Returns:
        comm_share, transfer_share, wait_share, each [R]: the sum over the instrumented steps'
        collectives / (their number x mean clean step time of that phase). transfer and wait leave
        the rooted kinds out. None if either pass has no such step.
    """
    total = np.zeros(joined.world)
    for code in range(len(PHASES)) if phase is None else (phase,):
        count = int((joined.steps["phase"] == code).sum())
        times = clean.of(code)
        if count == 0:
            continue
        if len(times) == 0:
            return None
        total += count * times.mean(axis=0)
    if not total.all():
        return None
    chosen = np.ones(len(joined.rows), bool) if phase is None else joined.phases() == phase
    reduces = chosen & joined.is_kind(Kind.ALL_REDUCE)
    return {
        "comm_share": joined.latency_us[chosen].sum(axis=0) / total,
        "transfer_share": joined.transfer_us[reduces].sum() / total,
        "wait_share": joined.wait_us[reduces].sum(axis=0) / total,
    }
