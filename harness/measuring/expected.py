"""What a model's shape says of a step's collectives, held against what was recorded.

No workload asks for prompt log-probabilities, whose steps have more gathers than are expected here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from engine.comm.types import Kind, Site
from engine.shape import ModelShape
from harness.measuring.attribution import AttributionError, Joined
from harness.observers.records import DECODE, ITEM_BYTES, PHASES, CountRecord


def expected_bytes(joined: Joined, shape: ModelShape) -> np.ndarray:
    """[N] payload that the model's shape asks for, -1 where it does not say (token ids).

    all_reduce: rows of the forward x hidden size; gather: sampling rows (in a replayed decode step
    all rows of the bucket; in other replays not said) x vocabulary, padded to a multiple of the
    ranks.
    """
    names = joined.records[0].dtypes
    item = np.array([ITEM_BYTES.get(name, 0) for name in names] or [0])[joined.rows["dtype"]]
    step = joined.steps[joined.step_index]
    vocab = -(-shape.vocab_size // joined.world) * joined.world
    reduce_bytes = step["bucket"].astype(np.int64) * shape.hidden_size * item
    gathered = np.where(joined.replayed, joined.steps["bucket"], joined.steps["samples"])
    gather_bytes = gathered[joined.step_index].astype(np.int64) * vocab * item
    padded = joined.replayed & (joined.steps["phase"] != DECODE)
    gather_bytes[padded[joined.step_index]] = -1
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
    for step, replayed in zip(joined.steps, joined.replayed, strict=True):
        found = groups[int(step["step"])]
        model = [pair for pair in found if pair != token_ids]
        wanted = [
            tuple(map(int, p))
            # A graph samples in every step.
            for p in shape.expected_collectives(joined.world, step["samples"] > 0 or replayed)
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


def check_counts(records: Sequence[CountRecord], log: np.ndarray, shape: ModelShape) -> None:
    """The same from counts alone, which know neither order nor size, in every step of `log` that
    was no replay.

    Raises:
        AttributionError: the first step of the first rank that differs, with both counts.
    """
    token_ids = (Kind.BROADCAST.label, Site.TOKEN_IDS.label)
    for record in records:
        for step in log[~log["replayed"]]:
            counted = {key: n for key, (n, _) in record.steps[int(step["step"])].items()}
            ids = counted.pop(token_ids, 0)
            sequence = shape.expected_collectives(record.world, step["samples"] > 0)
            wanted = Counter((kind.label, site.label) for kind, site in sequence)
            if counted != wanted or ids > (1 if record.world > 1 else 0):
                found = ", ".join(f"{n} {kind}/{site}" for (kind, site), n in counted.items())
                raise AttributionError(
                    f"step {step['step']} ({PHASES[step['phase']]}), rank {record.rank}: "
                    f"{found or 'no collectives'} and {ids} of token ids counted; a model of "
                    f"{shape.num_layers} layers at tp={record.world} has {_counts(sequence)}"
                )


def _counts(pairs: Sequence[tuple[int, ...]]) -> str:
    if not pairs:
        return "no collectives"
    names = [f"{Kind(k).label}/{Site(s).label}" for k, s in pairs]
    return ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names))
