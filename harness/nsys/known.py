"""What is known of the profiled steps: from the run's own tables, or from the export alone"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from engine.comm.types import Kind, Site
from harness.measuring.pass_plan import NSYS
from harness.nsys.place import JoinError, RankView
from harness.observers.nvtx import REPLAY, range_name
from harness.observers.records import DECODE, PHASE_CODES, PHASES, STEP_DTYPE

if TYPE_CHECKING:
    import pandas as pd

    from harness.store import Results

_KINDS = {kind.label: int(kind) for kind in Kind}
_SITES = {site.label: int(site) for site in Site}


class Sent(NamedTuple):
    """A collective as the engine sent it; bytes -1: not known."""

    kind: int
    site: int
    bytes: int
    dtype: str
    path: str


class Known(Protocol):
    def steps(self, view: RankView) -> tuple[np.ndarray, tuple[str, ...]]:
        """-> (STEP_DTYPE rows of the rank's steps, times 0; modes). JoinError if they differ."""
        ...

    def replay(self, step: np.void, kinds: Sequence[int]) -> list[Sent] | None:
        """The collectives of a replayed step whose communication kernels have these kinds (-1: the
        name does not tell); None where nothing says."""
        ...

    def names(self, kind: int, site: int) -> tuple[str, str]:
        """(dtype, path) of a launched collective."""
        ...


class FromExport:
    """Steps are numbered from 0. A replay has the order of a launched step with as many collectives
    of the same kinds; its sizes are not known, since a graph may have padded the batch."""

    def __init__(self, views: Sequence[RankView]) -> None:
        self._launched: list[list[Sent]] = []
        for view in views:
            for _, calls in view.calls.groupby("step"):
                sent = [Sent(int(k), int(s), -1, "", "") for k, s in calls[["kind", "site"]].values]
                if sent not in self._launched:
                    self._launched.append(sent)

    def steps(self, view: RankView) -> tuple[np.ndarray, tuple[str, ...]]:
        rows = np.zeros(len(view.steps), STEP_DTYPE)
        rows["step"] = np.arange(len(rows))
        rows["batch"] = view.steps["batch"]
        whats = view.steps["what"]
        rows["mode"] = whats.str.startswith(REPLAY)
        whats = whats.replace(REPLAY, "decode").str.removeprefix(f"{REPLAY}-")
        unknown = set(whats) - set(PHASE_CODES)
        if unknown:
            raise JoinError(f"ranges step/{sorted(unknown)[0]}: no such kind of step is known here")
        rows["phase"] = whats.map(PHASE_CODES)
        return rows, ("launched", "graph")

    def replay(self, step: np.void, kinds: Sequence[int]) -> list[Sent] | None:
        for sent in self._launched:
            if agree(kinds, sent):
                return sent
        if not kinds and not any(self._launched):
            return []
        name = range_name(PHASES[step["phase"]], True)
        found = f"step {step['step']} (step/{name}): {len(kinds)} communication kernels"
        if not self._launched:
            raise JoinError(
                f"{found}, and no step of this export was launched, which would say what they are; "
                "read it in the folder of its run, or profile with engine.graph_prompt_tokens=0"
            )
        lengths = sorted({len(sent) for sent in self._launched})
        raise JoinError(
            f"{found}; no launched step of this export has the same kinds in the same order (they "
            f"have {lengths})"
        )

    def names(self, kind: int, site: int) -> tuple[str, str]:
        return "", ""


class FromRun:
    """The tables of a run: numbers, sizes and modes of the steps of pass `nsys`; what a graph of so
    many rows holds, from another pass that replayed one."""

    def __init__(self, results: Results, point_id: str) -> None:
        columns = ["point_id", "rank", "pass", "step", "phase", "batch", "tokens", "bucket",
                   "samples", "mode"]  # fmt: skip
        steps = results.table("steps", columns)
        steps = steps[steps["point_id"] == point_id]
        self._own = steps[steps["pass"] == NSYS]
        columns = ["point_id", "rank", "pass", "step", "ordinal", "kind", "site", "bytes", "dtype",
                   "path", "mode"]  # fmt: skip
        sent = results.table("collectives", columns)
        sent = sent[(sent["point_id"] == point_id) & (sent["rank"] == 0) & (sent["pass"] != NSYS)]
        sent = sent.sort_values(["pass", "step", "ordinal"])
        self._names = {
            (_KINDS[row.kind], _SITES[row.site]): (row.dtype, row.path)
            for row in sent.drop_duplicates(["kind", "site"]).itertuples()
        }
        sent = sent[sent["mode"].str.startswith("graph")]
        of_rank = steps[steps["rank"] == 0].set_index(["pass", "step"])[["phase", "bucket"]]
        self._graphs: dict[tuple[bool, int], list[Sent]] = {}
        for (name, step), rows in sent.groupby(["pass", "step"], sort=False):
            phase, bucket = of_rank.loc[(name, step)]
            graph = phase == PHASES[DECODE], int(bucket)
            if graph not in self._graphs:
                self._graphs[graph] = [
                    Sent(_KINDS[r.kind], _SITES[r.site], int(r.bytes), r.dtype, r.path)
                    for r in rows.itertuples()
                ]

    def steps(self, view: RankView) -> tuple[np.ndarray, tuple[str, ...]]:
        own = self._own[self._own["rank"] == view.rank].sort_values("step")
        if len(own) != len(view.steps):
            raise JoinError(
                f"rank {view.rank}: {len(view.steps)} step ranges in the export, {len(own)} steps "
                f"in the run's table (pass {NSYS})"
            )
        modes = tuple(sorted(set(own["mode"])))
        rows = np.zeros(len(own), STEP_DTYPE)
        for name in ("step", "batch", "tokens", "bucket", "samples"):
            rows[name] = own[name]
        rows["phase"] = own["phase"].map(PHASE_CODES)
        rows["mode"] = own["mode"].map(modes.index)
        self._check(view, own)
        return rows, modes

    def _check(self, view: RankView, own: pd.DataFrame) -> None:
        wanted = [
            range_name(phase, mode.startswith("graph"))
            for phase, mode in zip(own["phase"], own["mode"], strict=True)
        ]
        for index, (found, there) in enumerate(zip(view.steps["what"], wanted, strict=True)):
            if found != there:
                raise JoinError(
                    f"{view.step_name(index)}: the run's table has step/{there} at this place"
                )

    def replay(self, step: np.void, kinds: Sequence[int]) -> list[Sent] | None:
        if not kinds and not self._names:  # tp=1
            return []
        return self._graphs.get((int(step["phase"]) == DECODE, int(step["bucket"])))

    def names(self, kind: int, site: int) -> tuple[str, str]:
        if (kind, site) not in self._names:
            raise JoinError(
                f"{Kind(kind).label}/{Site(site).label}: no other pass of the run has one; it "
                "needs instrument.collectives=true"
            )
        return self._names[kind, site]


def agree(kinds: Sequence[int], sent: Sequence[Sent]) -> bool:
    """Whether kernels of these kinds (-1: any) can be those collectives."""
    return len(kinds) == len(sent) and all(
        kind in (-1, one.kind) for kind, one in zip(kinds, sent, strict=True)
    )
