"""Communication kernels of an nsys export joined to (rank, step, ordinal, site)"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.comm.types import Kind, Site
from harness.measuring.attribution import AttributionError, Joined
from harness.measuring.attribution import join as join_ranks
from harness.measuring.pass_plan import NSYS
from harness.measuring.profile import kind_of
from harness.nsys.known import FromExport, Known, Sent, agree
from harness.nsys.place import JoinError, RankView, place
from harness.observers.kernels import COMMUNICATION
from harness.observers.nvtx import REPLAY
from harness.observers.records import COLLECTIVE_DTYPE, DECODE, Names, RankRecord

if TYPE_CHECKING:
    from harness.nsys.reader import Export


@dataclass(frozen=True, slots=True)
class Profile:
    """An export joined.

    Attributes:
        joined: its steps and collectives; latency_us is the kernel's own time, step_us from the
            begin of a step's first kernel to the end of its last one. Where an export was read
            without its run, bytes of replays are -1.
        views: by rank; their kernels have `ordinal` besides (-1: not a collective's).
        numbers: [S] of the views' steps; left_out: [S] bool: not in `joined`.
        notes: what was left out, and why.
    """

    export: Export
    joined: Joined
    views: tuple[RankView, ...]
    numbers: np.ndarray
    left_out: np.ndarray
    notes: tuple[str, ...]


def join(export: Export, known: Known | None = None) -> Profile:
    """Joins an export, with what its run's tables say or alone.

    A launched collective is the one communication kernel that was launched within its range. In a
    replay nothing but the step has a range; there the n-th communication kernel to begin is the
    n-th collective, and the nodes of a graph must have the same order in all of its replays.

    Raises:
        JoinError: more or fewer kernels than collectives, and whatever `place` raises; the text
            names rank and step.
    """
    views = place(export)
    known = FromExport(views) if known is None else known
    counts = [len(view.steps) for view in views]
    if len(set(counts)) > 1:
        raise JoinError(f"{export.path}: the ranks have {counts} steps; each must have as many")
    cut = np.any([view.steps["end_ns"] < 0 for view in views], axis=0)
    notes = [f"{cut.sum()} steps had not ended when the capture did"] if cut.any() else []
    ranks = [_Rank(view, known, cut) for view in views]
    unknown = np.any([rank.unknown for rank in ranks], axis=0)
    if unknown.any():
        of_steps = np.concatenate([rank.steps[unknown] for rank in ranks])
        graphs = sorted({(int(s["bucket"]), bool(s["phase"] != DECODE)) for s in of_steps})
        notes.append(
            f"{unknown.sum()} replays left out: no other pass of the run replayed a graph of "
            f"{', '.join(f'{n} rows' + ' with prompts' * p for n, p in graphs)}, which would say "
            "what it holds"
        )
    if len(views) > 1 and not any(rank.calls for rank in ranks):
        raise JoinError(
            f"{export.path}: {len(views)} ranks ran steps without one communication kernel (names "
            f"with {', '.join(COMMUNICATION)}); ranks cannot do without, so this reader does not "
            "know theirs"
        )
    left_out = cut | unknown
    if left_out.all():
        raise JoinError(f"{export.path}: no step is left: {'; '.join(notes)}")
    outside = sum(int((v.kernels["communication"] & (v.kernels["step"] < 0)).sum()) for v in views)
    if outside:
        notes.append(
            f"{outside} communication kernels lie outside of all steps (ranks meet by one each at "
            "the ends of the captured range)"
        )
    try:
        joined = join_ranks([rank.record(len(views), left_out) for rank in ranks])
    except AttributionError as error:
        raise JoinError(f"{export.path}: {error}") from error
    numbers = ranks[0].steps["step"]
    return Profile(export, joined, tuple(views), numbers, left_out, tuple(notes))


class _Rank:
    """One rank's steps with their collectives.

    Attributes:
        unknown: [S] replays of which nothing says what they hold.
        calls: communication kernels in its steps.
    """

    def __init__(self, view: RankView, known: Known, cut: np.ndarray) -> None:
        self.view, self._known = view, known
        self.steps, self._modes = known.steps(view)
        self.unknown = np.zeros(len(self.steps), bool)
        self.calls = int((view.kernels["communication"] & (view.kernels["step"] >= 0)).sum())
        self._dtypes, self._paths = Names(), Names()
        self._rows: list[tuple[int, ...]] = []
        self._nodes: dict[tuple[int, ...], tuple[int, list[int]]] = {}
        begins, ends = (view.kernels[name].to_numpy(np.int64) for name in ("start_ns", "end_ns"))
        of_step = view.kernels["step"].to_numpy()
        order = np.argsort(of_step, kind="stable")  # by begin within a step
        at = np.searchsorted(of_step[order], np.arange(len(self.steps) + 1))
        communication = view.kernels["communication"].to_numpy()
        ordinals = np.full(len(view.kernels), -1)
        for index in np.flatnonzero(~cut).tolist():
            kernels = order[at[index] : at[index + 1]]
            if len(kernels):
                self.steps["begin_ns"][index] = begins[kernels].min()
                self.steps["end_ns"][index] = ends[kernels].max()
            calls = kernels[communication[kernels]]
            replay = view.steps["what"].iloc[index].startswith(REPLAY)
            sent = self._replayed(index, calls) if replay else self._launched(index, calls)
            if sent is None:
                self.unknown[index] = True
                continue
            if not replay:
                calls = calls[np.argsort(view.kernels["call"].to_numpy()[calls], kind="stable")]
            ordinals[calls] = np.arange(len(calls))
            for ordinal, (one, kernel) in enumerate(zip(sent, calls, strict=True)):
                dtype, path = self._dtypes.code(one.dtype), self._paths.code(one.path)
                self._rows.append(
                    (int(self.steps["step"][index]), ordinal, one.kind, one.site, one.bytes, dtype,
                     path, int(begins[kernel]), int(ends[kernel]))
                )  # fmt: skip
        view.kernels["ordinal"] = ordinals

    def record(self, world: int, left_out: np.ndarray) -> RankRecord:
        """Without the steps of a mask [S]."""
        record = RankRecord(
            rank=self.view.rank,
            world=world,
            steps=self.steps,
            collectives=np.array(self._rows, COLLECTIVE_DTYPE),
            floor_ns=0,
            tick_ns=1,  # CUPTI's unit
            modes=self._modes,
            dtypes=self._dtypes.tuple(),
            paths=self._paths.tuple(),
            source=NSYS,
        )
        return record.of_steps(self.steps["step"][~left_out])

    def _launched(self, index: int, kernels: np.ndarray) -> list[Sent]:
        calls = self.view.calls[self.view.calls["step"] == index]
        launched_in = self.view.kernels["call"].to_numpy()[kernels]
        stray = kernels[launched_in < 0]
        if len(stray):
            name = self.view.kernels["name"].iloc[stray[0]]
            raise JoinError(
                f"{self.view.step_name(index)}: {len(stray)} communication kernels launched "
                f"outside of the ranges of its {len(calls)} collectives, the first {name}"
            )
        sent = []
        for call in calls.itertuples():
            own = int((launched_in == call.Index).sum())
            what = f"{Kind(call.kind).label}/{Site(call.site).label}"
            if own != 1:
                raise JoinError(
                    f"{self.view.step_name(index)}, ordinal {call.ordinal}: {own} communication "
                    f"kernels launched within the range {what}, where there must be one"
                )
            names = self._known.names(int(call.kind), int(call.site))
            sent.append(Sent(int(call.kind), int(call.site), int(call.bytes), *names))
        self._check_kinds(index, sent, kernels[np.argsort(launched_in, kind="stable")])
        return sent

    def _replayed(self, index: int, kernels: np.ndarray) -> list[Sent] | None:
        kinds = self._kinds(kernels)
        sent = self._known.replay(self.steps[index], kinds)
        if sent is None:
            return None
        self._check_kinds(index, sent, kernels)
        nodes = self.view.kernels["graph_node"].iloc[kernels].dropna().astype(int).tolist()
        first, order = self._nodes.setdefault(tuple(sorted(nodes)), (index, nodes))
        if order != nodes:
            raise JoinError(
                f"{self.view.step_name(index)}: the communication kernels of its graph began in "
                f"another order than in step {first}, so that their place is not known"
            )
        return sent

    def _kinds(self, kernels: np.ndarray) -> list[int]:
        return [kind_of(name) for name in self.view.kernels["name"].iloc[kernels]]

    def _check_kinds(self, index: int, sent: Sequence[Sent], kernels: np.ndarray) -> None:
        if not agree(self._kinds(kernels), sent):
            raise JoinError(
                f"{self.view.step_name(index)}: {len(kernels)} communication kernels for "
                f"{len(sent)} collectives, or of other kinds"
            )
