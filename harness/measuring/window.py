"""One measured window: the requests of one repeat, and what the engine recorded meanwhile."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.machine.nvml import Sampler
from harness.machine.telemetry import read as read_telemetry
from harness.observers.records import DECODE

if TYPE_CHECKING:
    from engine.requests.request import RequestOutput
    from harness.backends.base import Backend
    from harness.measuring.workload import Workload

# Growth of any of these inside a window means that something was built in it.
BUILD_COUNTERS = ("compiles", "graph_breaks", "captures", "triton_builds")


class MeasurementError(RuntimeError):
    """The point cannot be measured, or what was measured is not what was asked for."""


@dataclass(slots=True)
class Window:
    """One call of the engine with the whole workload.

    Attributes:
        outputs: of the requests, in the workload's order; asked: tokens asked of each.
        steps: the engine's step log, one array a rank, equal steps in equal rows.
        begin_s, end_s: perf_counter round the call.
        counters: by how much the engine's counters grew.
    """

    pass_name: str
    repeat: int
    outputs: list[RequestOutput]
    asked: tuple[int, ...]
    steps: list[np.ndarray]
    begin_s: float
    end_s: float
    started_at: datetime
    counters: dict[str, int]
    telemetry: list[dict[str, Any]] = field(default_factory=list)

    @property
    def wall_s(self) -> float:
        return self.end_s - self.begin_s

    @property
    def prompt_tokens(self) -> int:
        return sum(len(o.prompt_token_ids) for o in self.outputs)

    @property
    def output_tokens(self) -> int:
        return sum(len(o.token_ids) for o in self.outputs)

    @property
    def output_tok_s(self) -> float:
        return self.output_tokens / self.wall_s

    @property
    def built(self) -> dict[str, int]:
        """What was compiled, captured or built inside the window; empty if it is clean."""
        return {k: v for k in BUILD_COUNTERS if (v := self.counters.get(k, 0)) > 0}

    @property
    def decode_batch(self) -> int | None:
        """Most sequences in one pure decode step; None without one. Of an engine that logs no steps
        the most requests that were between their first and last token at once."""
        rows = self.steps[0]
        if not len(rows):
            return self._decoding_at_once()
        decode = rows["batch"][rows["phase"] == DECODE]
        return int(decode.max()) if len(decode) else None

    def _decoding_at_once(self) -> int | None:
        several = [o for o in self.outputs if o.tpot_s is not None]
        begins = np.sort([o.arrival_s + (o.ttft_s or 0) for o in several])
        ends = np.sort([o.arrival_s + (o.e2e_s or 0) for o in several])
        # At the begin of one: those that have begun, it included, less those that have ended.
        at_once = np.arange(1, len(begins) + 1) - np.searchsorted(ends, begins)
        return int(at_once.max()) if len(several) else None

    def step_us(self, phase: int | None = None) -> np.ndarray:
        """[S, R] forward and sampling, of one phase or of all steps."""
        times = np.stack([(s["end_ns"] - s["begin_ns"]) / 1e3 for s in self.steps], axis=1)
        return times if phase is None else times[self.steps[0]["phase"] == phase]


def serve(
    backend: Backend, workload: Workload, *, point_id: str, pass_name: str, repeat: int,
    arrivals: bool = True,
) -> Window:  # fmt: skip
    """Runs the workload once and reads the engine's records.

    Args:
        arrivals: False sends everything at once whatever the workload says (warm-up).

    Raises:
        MeasurementError: the ranks' step logs differ, or a step ends before it begins.
    """
    prompts = workload.prompts(point_id, pass_name, repeat)
    params = workload.params()
    offsets = workload.arrivals_s if arrivals else None
    backend.drain_steps()
    before = backend.counters()
    telemetry = read_telemetry("before")
    started_at = datetime.now(UTC)
    with Sampler() as sampler:
        begin_s = time.perf_counter()
        outputs = backend.generate(prompts, params, offsets)
        end_s = time.perf_counter()
    telemetry += sampler.rows(begin_s) + read_telemetry("after")
    after = backend.counters()
    window = Window(
        pass_name=pass_name,
        repeat=repeat,
        outputs=outputs,
        asked=workload.output_lens,
        steps=backend.drain_steps(),
        begin_s=begin_s,
        end_s=end_s,
        started_at=started_at,
        counters={k: v - before.get(k, 0) for k, v in after.items()},
        telemetry=telemetry,
    )
    _check_steps(window)
    return window


def check_outputs(window: Window) -> None:
    """Raises MeasurementError where fewer tokens came than were asked for, or a request failed."""
    outputs, asked = window.outputs, window.asked
    if len(outputs) != len(asked):
        raise MeasurementError(f"short_output: {len(outputs)} of {len(asked)} requests came back")
    failed = [(i, o) for i, o in enumerate(outputs) if o.error is not None]
    if failed:
        i, first = failed[0]
        raise MeasurementError(
            f"{len(failed)} of {len(outputs)} requests failed; request {i}: {first.error}"
        )
    short = [i for i, o in enumerate(outputs) if len(o.token_ids) < asked[i]]
    if short:
        i = short[0]
        raise MeasurementError(
            f"short_output: {len(short)} of {len(outputs)} requests gave fewer tokens than asked; "
            f"request {i}: {len(outputs[i].token_ids)} of {asked[i]}"
        )


def _check_steps(window: Window) -> None:
    first = window.steps[0]
    for rank, rows in enumerate(window.steps):
        for name in ("step", "phase", "batch", "tokens"):
            if not np.array_equal(first[name], rows[name]):
                raise MeasurementError(f"the step logs of rank 0 and rank {rank} differ in {name}")
        for begin, end in (("begin_ns", "end_ns"), ("wall_begin_ns", "wall_end_ns")):
            backwards = rows["step"][rows[end] < rows[begin]]
            if len(backwards):
                raise MeasurementError(
                    f"step {backwards[0]} on rank {rank}: {end} lies before {begin}, so that its "
                    "time would be below zero"
                )
