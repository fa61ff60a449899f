"""A profile's communication kernels matched to their collectives, by order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.comm.types import Kind
from harness.measuring.attribution import Joined, join
from harness.observers.records import COLLECTIVE_DTYPE, ProfileRecord, RankRecord

KERNELS = {
    "AllReduce": Kind.ALL_REDUCE,
    "all_reduce": Kind.ALL_REDUCE,
    "_reduce_add_norm": Kind.ALL_REDUCE,
    "SendRecv": Kind.GATHER,
    "Broadcast": Kind.BROADCAST,
}
"""Part of a kernel's name, of NCCL, torch's symmetric memory and comm=symm_fused -> collective.
NCCL gathers by sends and receives."""


class ProfileError(ValueError):
    """The kernels of a profile cannot be told apart; the text says why."""


def join_profiles(profiles: Sequence[ProfileRecord], pattern: Joined) -> Joined:
    """Kernel times as a joined pass of their own (latency_us is the kernel's time).

    On one stream the n-th communication kernel of a step is its n-th collective. Steps with their
    collectives are taken from `pattern`, a pass of the same point, by phase, bucket and number of
    samples.
    The first profiled step is left out: there ranks wait for each other's profilers.

    Raises:
        ProfileError: other kernels than the collectives of the steps.
        AttributionError: ranks that do not agree.
    """
    return join([_record(profile, pattern) for profile in profiles])


def _record(profile: ProfileRecord, pattern: Joined) -> RankRecord:
    assert profile.error is None
    names = pattern.records[0]
    steps = []
    for step in profile.steps:
        same = np.logical_and.reduce(
            [pattern.steps[name] == step[name] for name in ("phase", "bucket", "samples")]
        )
        if not same.any():
            raise ProfileError(f"step {step['step']}: no other pass has one of its size")
        rows = pattern.rows[pattern.step_index == np.argmax(same)].astype(COLLECTIVE_DTYPE)
        rows["step"] = step["step"]
        steps.append(rows)
    rows = np.concatenate(steps)
    kinds = [kind_of(name) for name in profile.names]
    if kinds != rows["kind"].tolist():
        raise ProfileError(
            f"rank {profile.rank}: {len(kinds)} communication kernels in {len(steps)} steps of "
            f"{len(rows)} collectives, or in another order"
        )
    rows["before_ns"] = profile.begin_ns
    rows["after_ns"] = profile.begin_ns + profile.duration_ns
    record = RankRecord(
        rank=profile.rank,
        world=profile.world,
        steps=profile.steps,
        collectives=rows,
        floor_ns=0,
        tick_ns=1,  # CUPTI's unit
        modes=profile.modes,
        dtypes=names.dtypes,
        paths=names.paths,
        source="cupti",
    )
    return record.of_steps(profile.steps["step"][1:])


def kind_of(name: str) -> int:
    """The collective of a communication kernel; -1 where its name does not tell."""
    return next((int(kind) for part, kind in KERNELS.items() if part in name), -1)
