"""Ranks' records joined collective by collective, and what is transfer and what is waiting.

Each rank keeps its own rows; two rows are one collective if (step, ordinal) agree within one pass.
Everything is in microseconds, less the timer's floor, and nothing is clamped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.comm.types import Kind, Site
from engine.shape import ModelShape
from harness.records import PHASES, HostRecord

_LAYER_SITES = (Site.ATTN_O_PROJ, Site.MLP_DOWN_PROJ)
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4}


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
        latency_us: [N, R] less floor_us of the rank.
        transfer_us: [N] all_reduce: minimum over ranks; NaN for rooted kinds (gather, broadcast).
        wait_us: [N, R] latency_us - transfer_us.
        steps: [S] of rank 0; step_us: [S, R]; begin_ns: [S, R].
    """

    rows: np.ndarray
    step_index: np.ndarray
    layer: np.ndarray
    latency_us: np.ndarray
    transfer_us: np.ndarray
    wait_us: np.ndarray
    steps: np.ndarray
    step_us: np.ndarray
    begin_ns: np.ndarray
    floor_us: np.ndarray
    tick_us: np.ndarray
    records: tuple[HostRecord, ...]

    @property
    def world(self) -> int:
        return len(self.records)

    def is_kind(self, kind: Kind) -> np.ndarray:
        """[N] bool."""
        return self.rows["kind"] == kind

    def phases(self) -> np.ndarray:
        """[N] phase code of each collective's step."""
        return self.steps["phase"][self.step_index]


def join(records: Sequence[HostRecord]) -> Joined:
    """Joins the ranks' records, in whatever order the rows and ranks come.

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
    floor_us = np.array([r.floor_ns / 1e3 for r in ranks])
    latency = np.stack([(r["after_ns"] - r["before_ns"]) / 1e3 for r in rows], axis=1) - floor_us
    rooted = rows[0]["kind"] != Kind.ALL_REDUCE
    transfer = np.where(rooted, np.nan, latency.min(axis=1, initial=np.inf))
    return Joined(
        rows=rows[0],
        step_index=step_index,
        layer=_layers(rows[0]),
        latency_us=latency,
        transfer_us=transfer,
        wait_us=latency - transfer[:, None],
        steps=steps[0],
        step_us=np.stack([(s["end_ns"] - s["begin_ns"]) / 1e3 for s in steps], axis=1),
        begin_ns=np.stack([s["begin_ns"] for s in steps], axis=1),
        floor_us=floor_us,
        tick_us=np.array([r.tick_ns / 1e3 for r in ranks]),
        records=ranks,
    )


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
    rank: int, ranks: Sequence[HostRecord], first: np.ndarray, other: np.ndarray
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


def expected_bytes(joined: Joined, shape: ModelShape) -> np.ndarray:
    """[N] payload that the model's shape asks for, -1 where it does not say (token ids).

    all_reduce: rows of the forward x hidden size; gather: sampling rows x vocabulary, padded to a
    multiple of the ranks.
    """
    names = joined.records[0].dtypes
    item = np.array([_ITEM_BYTES.get(name, 0) for name in names] or [0])[joined.rows["dtype"]]
    step = joined.steps[joined.step_index]
    vocab = -(-shape.vocab_size // joined.world) * joined.world
    reduce_bytes = step["bucket"].astype(np.int64) * shape.hidden_size * item
    gather_bytes = step["samples"].astype(np.int64) * vocab * item
    found = np.where(joined.is_kind(Kind.ALL_REDUCE), reduce_bytes, -1)
    return np.where(joined.is_kind(Kind.GATHER), gather_bytes, found)


def check_expected(joined: Joined, shape: ModelShape) -> None:
    """Compares every step with the sequence of collectives that the model must issue, and the
    all-reduces' bytes; one broadcast of token ids is allowed in a step and counted apart.

    Raises:
        AttributionError: the first step that differs, with both counts or both sizes.
    """
    groups: dict[int, list[tuple[int, int]]] = {int(s): [] for s in joined.steps["step"]}
    for row in joined.rows:
        groups[int(row["step"])].append((int(row["kind"]), int(row["site"])))
    token_ids = (int(Kind.BROADCAST), int(Site.TOKEN_IDS))
    for step in joined.steps:
        found = groups[int(step["step"])]
        model = [pair for pair in found if pair != token_ids]
        wanted = [
            tuple(map(int, p))
            for p in shape.expected_collectives(joined.world, step["samples"] > 0)
        ]
        if model != wanted or len(found) - len(model) > (1 if joined.world > 1 else 0):
            raise AttributionError(
                f"step {step['step']} ({PHASES[step['phase']]}): {_counts(found)}; a model of "
                f"{shape.num_layers} layers at tp={joined.world} has {_counts(wanted)}"
            )
    wanted_bytes = expected_bytes(joined, shape)
    wrong = joined.is_kind(Kind.ALL_REDUCE) & (joined.rows["bytes"] != wanted_bytes)
    if wrong.any():
        at = int(np.argmax(wrong))
        row = joined.rows[at]
        raise AttributionError(
            f"step {row['step']}, ordinal {row['ordinal']}: an all_reduce of {row['bytes']} bytes, "
            f"the step's rows and the model's width make {wanted_bytes[at]}"
        )


def _counts(pairs: Sequence[tuple[int, ...]]) -> str:
    if not pairs:
        return "no collectives"
    names = [f"{Kind(k).label}/{Site(s).label}" for k, s in pairs]
    return ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names))


def bandwidth(joined: Joined) -> tuple[np.ndarray, np.ndarray]:
    """([N] algbw, [N] busbw) in GB/s; NaN where the time is not above zero.

    all_reduce: bytes / transfer_us, busbw x 2(n-1)/n; gather: bytes / latency_us at the root,
    busbw x (n-1)/n; broadcast: the same at the root, busbw = algbw (nccl-tests' definitions).
    """
    n = joined.world
    rooted = ~joined.is_kind(Kind.ALL_REDUCE)
    time_us = np.where(rooted, joined.latency_us[:, 0], joined.transfer_us)
    usable = np.where(time_us > 0, time_us, np.nan)
    algbw = joined.rows["bytes"] / usable / 1e3
    factor = np.where(joined.is_kind(Kind.ALL_REDUCE), 2 * (n - 1) / n, 1.0)
    factor = np.where(joined.is_kind(Kind.GATHER), (n - 1) / n, factor)
    return algbw, algbw * factor


def shares(
    joined: Joined, clean: Sequence[np.ndarray], phase: int | None
) -> dict[str, np.ndarray] | None:
    """Shares of communication in the clean step time, per rank.

    Args:
        clean: one array a rank of the plain pass' steps (fields phase, begin_ns, end_ns).
        phase: of the steps to look at; None: all, each phase weighed by its own clean mean.

    Returns:
        comm_share, transfer_share, wait_share, each [R]: the sum over the instrumented steps'
        collectives / (their number x mean clean step time of that phase). transfer and wait leave
        the rooted kinds out. None if either pass has no such step.
    """
    total = np.zeros(joined.world)
    for code in range(len(PHASES)) if phase is None else (phase,):
        count = int((joined.steps["phase"] == code).sum())
        times = [s[s["phase"] == code] for s in clean]
        if count == 0:
            continue
        if any(len(t) == 0 for t in times):
            return None
        total += [count * float((t["end_ns"] - t["begin_ns"]).mean()) / 1e3 for t in times]
    if not total.all():
        return None
    chosen = np.ones(len(joined.rows), bool) if phase is None else joined.phases() == phase
    transfer = np.nansum(joined.transfer_us[chosen])
    return {
        "comm_share": joined.latency_us[chosen].sum(axis=0) / total,
        "transfer_share": transfer / total,
        "wait_share": np.nansum(joined.wait_us[chosen], axis=0) / total,
    }
