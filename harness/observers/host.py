"""The host's clock round every step and collective: what times a CPU run."""

from __future__ import annotations

from time import perf_counter_ns

from engine.comm.types import (
    Collective,
    CollectiveObserver,
    Kind,
    ObserverContext,
    Site,
    StepInfo,
)
from harness.observers import clocks
from harness.observers.records import (
    COLLECTIVE_DTYPE,
    PHASE_CODES,
    STEP_DTYPE,
    Names,
    RankRecord,
    Rows,
)


class HostTimerObserver(CollectiveObserver):
    """Reads the host's clock round every step and collective, into preallocated rows."""

    def __init__(self, context: ObserverContext) -> None:
        self._rank, self._world = context.rank, context.world
        self._steps = Rows(STEP_DTYPE, 1024)
        self._collectives = Rows(COLLECTIVE_DTYPE, 16384)
        self._modes, self._dtypes, self._paths = Names(), Names(), Names()
        self._step_row = self._row = -1
        self.tick_ns = clocks.tick_ns()
        self.floor_ns = clocks.floor_ns(self._pair_round_nothing)
        self._collectives.count = 0
        self._dtypes, self._paths = Names(), Names()

    def step_begin(self, step: StepInfo) -> None:
        self._step_row = self._steps.append(
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
        self._steps.array["begin_ns"][self._step_row] = perf_counter_ns()

    def step_end(self, step: StepInfo) -> None:
        self._steps.array["end_ns"][self._step_row] = perf_counter_ns()

    def before(self, collective: Collective) -> None:
        self._row = self._collectives.append(
            (
                collective.step,
                collective.ordinal,
                collective.kind,
                collective.site,
                collective.bytes,
                self._dtypes.code(collective.dtype),
                self._paths.code(collective.path),
                0,
                0,
            )
        )
        self._collectives.array["before_ns"][self._row] = perf_counter_ns()

    def after(self, collective: Collective) -> None:
        now = perf_counter_ns()
        self._collectives.array["after_ns"][self._row] = now

    def result(self) -> RankRecord:
        return RankRecord(
            rank=self._rank,
            world=self._world,
            steps=self._steps.taken(),
            collectives=self._collectives.taken(),
            floor_ns=self.floor_ns,
            tick_ns=self.tick_ns,
            modes=self._modes.tuple(),
            dtypes=self._dtypes.tuple(),
            paths=self._paths.tuple(),
        )

    def _pair_round_nothing(self) -> int:
        nothing = Collective(0, 0, Kind.ALL_REDUCE, Site.EMBED, 0, "", self._world, self._rank, "")
        self.before(nothing)
        self.after(nothing)
        row = self._collectives.array[self._row]
        return int(row["after_ns"] - row["before_ns"])
