"""What the two timers of a GPU have in common: which reading belongs to which collective.

Every step has a row of readings: slot 0 its begin, slot 1 its end, slots 2 + 2i and 3 + 2i before
and after its i-th collective. In a captured graph the same readings are repeated by each replay, of
which the host notes the step alone; the collectives are those that were heard while capturing.
"""

from __future__ import annotations

from abc import abstractmethod

import numpy as np

from engine.comm.types import Collective, CollectiveObserver, ObserverContext, Phase, StepInfo
from harness.observers.records import (
    COLLECTIVE_DTYPE,
    PHASE_CODES,
    STEP_DTYPE,
    Names,
    RankRecord,
    Rows,
)

BEGIN, END, FIRST = 0, 1, 2
MAX_COLLECTIVES = 256  # of one step; the 32B model has 131
SLOTS = FIRST + 2 * MAX_COLLECTIVES

Note = tuple[int, ...]
"""(row of the step, ordinal, kind, site, bytes, dtype, path)"""


def graph_of(step: StepInfo) -> int:
    """Tells the graphs of an engine apart as far as their collectives do: a decode step's by its
    rows, those of other steps by the same as a negative number."""
    return step.bucket if step.phase is Phase.DECODE else -step.bucket


class DeviceTimer(CollectiveObserver):
    """Times steps, and if asked for collectives, by readings that the GPU takes.

    Steps in which a graph was captured are left out of the result: their ranks waited for each
    other's captures.
    """

    captures = True
    source: str

    def __init__(self, context: ObserverContext, collectives: bool) -> None:
        self._rank, self._world = context.rank, context.world
        self._collectives = collectives
        self._steps = Rows(STEP_DTYPE, 1024)
        self._modes, self._dtypes, self._paths = Names(), Names(), Names()
        self._launched: list[Note] = []  # of steps that Python ran
        self._captured: dict[int, list[Note]] = {}  # of one replay, by graph
        self._graph_of_row: list[int | None] = []  # None: not replayed
        self._capturing: set[int] = set()  # rows of steps in which a graph was captured
        self._sink, self._count = self._launched, 0
        self.tick_ns, self.floor_ns, self.graph_floor_ns = self._calibrate()

    # -- what an implementation provides ----------------------------------------------------------

    @abstractmethod
    def _calibrate(self) -> tuple[int, int, int]:
        """(tick, floor of launched pairs, floor of pairs in a graph), ns."""

    @abstractmethod
    def _row_begins(self) -> None:
        """The host's work between steps; nothing of the step is enqueued yet."""

    @abstractmethod
    def _begin(self, graph: int | None) -> None:
        """Enqueues the reading of slot 0; in a `graph`, or launched if it is None."""

    @abstractmethod
    def _mark(self, slot: int) -> None:
        """Enqueues the reading of a slot."""

    @abstractmethod
    def _times(self) -> np.ndarray:
        """[steps, slots] int64 ns of all steps so far, after waiting for them."""

    # -- what the communicator calls --------------------------------------------------------------

    def step_begin(self, step: StepInfo) -> None:
        self._row_begins()
        self._steps.append(
            (
                step.step,
                PHASE_CODES[step.phase],
                step.batch,
                step.tokens,
                step.bucket,
                step.samples,
                self._modes.code(step.mode),
                0,
                0,
            )
        )
        self._graph_of_row.append(graph_of(step) if step.replayed else None)
        if not step.replayed:
            self._sink, self._count = self._launched, 0
            self._begin(None)

    def step_end(self, step: StepInfo) -> None:
        if not step.replayed:
            self._mark(END)

    def before(self, collective: Collective) -> None:
        if not self._collectives:
            return
        if self._count == MAX_COLLECTIVES:
            raise RuntimeError(
                f"step {collective.step} has more than {MAX_COLLECTIVES} collectives, which a row "
                "of readings has room for"
            )
        self._sink.append(
            (
                self._steps.count - 1,
                collective.ordinal,
                collective.kind,
                collective.site,
                collective.bytes,
                self._dtypes.code(collective.dtype),
                self._paths.code(collective.path),
            )
        )
        self._mark(FIRST + 2 * self._count)

    def after(self, collective: Collective) -> None:
        if self._collectives:
            self._mark(FIRST + 2 * self._count + 1)
            self._count += 1

    def capture_begin(self, step: StepInfo) -> None:
        self._capturing.add(self._steps.count - 1)
        self._sink = self._captured[graph_of(step)] = []
        self._count = 0
        self._begin(graph_of(step))

    def capture_end(self, step: StepInfo) -> None:
        self._mark(END)

    def result(self) -> RankRecord:
        times = self._times()
        steps = self._steps.taken()
        steps["begin_ns"], steps["end_ns"] = times[:, BEGIN], times[:, END]
        notes = list(self._launched)
        for place, graph in enumerate(self._graph_of_row):
            if graph is not None:
                notes += [(place, *note[1:]) for note in self._captured[graph]]
        table = np.array(notes, np.int64).reshape(len(notes), 7)
        row, ordinal = table[:, 0], table[:, 1]
        rows = np.zeros(len(notes), COLLECTIVE_DTYPE)
        rows["step"] = steps["step"][row]
        for column, name in enumerate(("ordinal", "kind", "site", "bytes", "dtype", "path"), 1):
            rows[name] = table[:, column]
        rows["before_ns"] = times[row, FIRST + 2 * ordinal]
        rows["after_ns"] = times[row, FIRST + 2 * ordinal + 1]
        kept = ~np.isin(np.arange(len(steps)), list(self._capturing))
        return RankRecord(
            rank=self._rank,
            world=self._world,
            steps=steps[kept],
            collectives=rows[kept[row]],
            floor_ns=self.floor_ns,
            tick_ns=self.tick_ns,
            modes=self._modes.tuple(),
            dtypes=self._dtypes.tuple(),
            paths=self._paths.tuple(),
            source=self.source,
            graph_floor_ns=self.graph_floor_ns,
        )
