"""Where each kernel of an export belongs: its rank, its step, the range that launched it"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.comm.types import Kind, Site
from harness.nsys.reader import RUNTIME
from harness.observers.kernels import communicates
from harness.observers.nvtx import NVTX_DOMAIN, REPLAY

if TYPE_CHECKING:
    import pandas as pd

    from harness.nsys.reader import Export

_STEP = "step/"
_KINDS = {kind.label: int(kind) for kind in Kind}
_SITES = {site.label: int(site) for site in Site}


class JoinError(ValueError):
    """An export whose kernels cannot be joined to collectives; the text says where and why."""


@dataclass(frozen=True, slots=True)
class RankView:
    """One rank's part of an export; S steps in their order, C calls of collectives, K kernels.

    Attributes:
        steps: what (prefill, decode, mixed or replay), batch (0: not given), tid, start_ns, end_ns
            (-1: the capture ended first).
        calls: step (index), ordinal, kind, site, bytes, tid, start_ns, end_ns, by start. A replay
            has none.
        kernels: of the export, with `step` (index, -1: launched outside of steps), `call` (index,
            -1: outside of calls) and `communication`.
    """

    rank: int
    pid: int
    device: int
    steps: pd.DataFrame
    calls: pd.DataFrame
    kernels: pd.DataFrame

    def step_name(self, index: int) -> str:
        return f"step {index} ({_STEP}{self.steps['what'].iloc[index]}) of rank {self.rank}"


def place(export: Export) -> list[RankView]:
    """The ranks: the processes that opened step ranges, in the order of their devices, since the
    engine runs rank n on device n. Ranges and kernels of other processes are left aside.

    A kernel belongs to the ranges within which it was launched, on the thread that launched it; the
    device runs it later.

    Raises:
        JoinError: no steps, no kernels, or ranks that cannot be told apart.
    """
    ranges = export.ranges[export.ranges["domain"] == NVTX_DOMAIN]
    message = ranges["message"].astype(str)
    steps, calls = ranges[message.str.startswith(_STEP)], ranges[message.map(_is_call).astype(bool)]
    if steps.empty:
        other = f"; it has {len(export.ranges)} ranges of others" if len(export.ranges) else ""
        raise JoinError(
            f"{export.path}: no range {_STEP}* of the domain {NVTX_DOMAIN}{other} (nsys "
            f"{export.product}). nsys of 2022 and 2023 does not hear nvtx 0.2.12 and newer: take "
            "nsys 2025.3, or nvtx 0.2.11"
        )
    if export.whole_graphs and message.str.startswith(f"{_STEP}{REPLAY}").any():
        raise JoinError(
            f"{export.path}: {export.whole_graphs} launches of CUDA graphs were recorded as a "
            "whole, without their kernels; profile with --cuda-graph-trace=node"
        )
    if export.kernels.empty:
        raise JoinError(
            f"{export.path}: no kernels (missing tables: {', '.join(export.missing)}); profile "
            "with --trace=cuda,nvtx on a machine with a GPU"
        )
    if RUNTIME in export.missing:
        raise JoinError(
            f"{export.path}: {RUNTIME} is missing, so that nothing says who launched which kernel"
        )
    devices = _devices(export, steps["pid"].unique().tolist())
    ranks = sorted(devices, key=lambda pid: (devices[pid], pid))
    return [
        _view(export, rank, pid, devices[pid], _of(steps, pid), _of(calls, pid))
        for rank, pid in enumerate(ranks)
    ]


def _is_call(message: str) -> bool:
    kind, _, site = message.partition("/")
    return kind in _KINDS and site in _SITES


def _of(frame: pd.DataFrame, pid: int) -> pd.DataFrame:
    return frame[frame["pid"] == pid].sort_values("start_ns", kind="stable", ignore_index=True)


def _devices(export: Export, pids: list[int]) -> dict[int, int]:
    """{pid: device that most of its kernels ran on}."""
    found: dict[int, int] = {}
    for pid in sorted(pids):
        of_process = export.kernels.loc[export.kernels["pid"] == pid, "device"]
        if of_process.empty:
            raise JoinError(
                f"{export.path}: process {pid} opened step ranges and ran no kernel; was CUDA "
                "traced in it?"
            )
        device = int(of_process.mode().iloc[0])
        if device in found.values():
            other = next(p for p, d in found.items() if d == device)
            raise JoinError(
                f"{export.path}: processes {other} and {pid} both ran steps on device {device}, so "
                "that nobody knows which rank is which"
            )
        found[pid] = device
    return found


def _view(
    export: Export, rank: int, pid: int, device: int, steps: pd.DataFrame, calls: pd.DataFrame
) -> RankView:
    steps = steps.assign(
        what=steps["message"].str.removeprefix(_STEP),
        batch=steps["payload"].fillna(0).astype("int64"),
    )
    steps = _timed(steps[["what", "batch", "tid", "start_ns", "end_ns"]])
    parts = calls["message"].str.partition("/") if len(calls) else None
    calls = calls.assign(
        kind=[] if parts is None else parts[0].map(_KINDS),
        site=[] if parts is None else parts[2].map(_SITES),
        bytes=calls["payload"].fillna(-1).astype("int64"),
    )
    calls = _timed(calls[["kind", "site", "bytes", "tid", "start_ns", "end_ns"]])
    calls.insert(0, "step", within(steps, calls["tid"], calls["start_ns"]))
    calls = calls[calls["step"] >= 0].reset_index(drop=True)
    calls.insert(1, "ordinal", calls.groupby("step").cumcount())

    kernels = _of(export.kernels, pid)
    launches = export.launches.loc[export.launches["pid"] == pid]
    launches = launches[["correlation", "tid", "start_ns"]].rename(columns={"start_ns": "at_ns"})
    launched = kernels[["correlation"]].merge(launches, on="correlation", how="left")
    tid, at_ns = launched["tid"].fillna(-1), launched["at_ns"].fillna(np.iinfo(np.int64).min)
    kernels["step"] = within(steps, tid, at_ns)
    kernels["call"] = within(calls, tid, at_ns)
    names = kernels["name"].astype(str)
    kernels["communication"] = [communicates(name) for name in names]
    return RankView(rank, pid, device, steps, calls, kernels)


def _timed(frame: pd.DataFrame) -> pd.DataFrame:
    frame = frame.reset_index(drop=True)
    frame["end_ns"] = frame["end_ns"].fillna(-1)
    return frame.astype(dict.fromkeys(("tid", "start_ns", "end_ns"), "int64"))


def within(ranges: pd.DataFrame, tid: pd.Series, at_ns: pd.Series) -> np.ndarray:
    """[N] index of the range of `ranges` that was open on thread `tid` at `at_ns`; -1: none. The
    ranges of a thread do not overlap."""
    threads, times = tid.to_numpy(np.int64), at_ns.to_numpy(np.int64)
    found = np.full(len(threads), -1)
    for thread in ranges["tid"].unique():
        own = np.flatnonzero((ranges["tid"] == thread).to_numpy())
        asked = np.flatnonzero(threads == thread)
        starts = ranges["start_ns"].to_numpy()[own]
        last = np.searchsorted(starts, times[asked], side="right") - 1
        inside = (last >= 0) & (times[asked] <= ranges["end_ns"].to_numpy()[own][last])
        found[asked[inside]] = own[last[inside]]
    return found
