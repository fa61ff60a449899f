"""A rank's own record of its steps: always kept, a row of numbers and two clocks a step."""

from __future__ import annotations

import numpy as np

from engine.comm.types import Phase, StepInfo

PHASES = (Phase.PREFILL, Phase.DECODE, Phase.MIXED)

STEP_DTYPE = np.dtype(
    [
        ("step", "i8"),
        ("phase", "u1"),  # index into PHASES
        ("batch", "i4"),
        ("tokens", "i4"),
        ("bucket", "i4"),
        ("samples", "i4"),
        ("replayed", "?"),  # as a CUDA graph; the other steps of such an engine run uncaptured
        ("begin_ns", "i8"),  # forward and sampling on this rank, time.perf_counter_ns
        ("end_ns", "i8"),
        ("wall_begin_ns", "i8"),  # rank 0: plan to collect, less what the step before took of it;
        # other ranks: as begin_ns, end_ns
        ("wall_end_ns", "i8"),
    ]
)


class StepLog:
    """Structured rows that grow by doubling; `drain` hands them over and starts afresh."""

    def __init__(self, capacity: int = 4096) -> None:
        self._rows = np.zeros(capacity, STEP_DTYPE)
        self._count = 0

    def append(self, info: StepInfo, begin_ns: int, end_ns: int) -> None:
        if self._count == len(self._rows):
            self._rows = np.concatenate([self._rows, np.zeros_like(self._rows)])
        self._rows[self._count] = (
            info.step,
            PHASES.index(info.phase),
            info.batch,
            info.tokens,
            info.bucket,
            info.samples,
            info.replayed,
            begin_ns,
            end_ns,
            begin_ns,
            end_ns,
        )
        self._count += 1

    def set_wall(self, step: int, begin_ns: int, end_ns: int) -> None:
        """Stamps the row of a step, if it was not drained already. Numbers grow and may have gaps:
        a step that raised left no row."""
        row = int(np.searchsorted(self._rows["step"][: self._count], step))
        if row < self._count and self._rows[row]["step"] == step:
            self._rows[row]["wall_begin_ns"] = begin_ns
            self._rows[row]["wall_end_ns"] = end_ns

    def drain(self) -> np.ndarray:
        rows = self._rows[: self._count].copy()
        self._count = 0
        return rows
