"""The passes of one point: warm-up, plain repeats until steady, those with instruments."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.machine.telemetry import busy_note
from harness.measuring import gpu_state, pass_plan
from harness.measuring.pass_plan import TimedPass
from harness.measuring.stats import relative_noise
from harness.measuring.step_times import StepTimes
from harness.measuring.window import MeasurementError, Window, check_outputs, serve
from harness.observers.records import CountRecord, ProfileRecord, RankRecord
from harness.settings.effective import differences

if TYPE_CHECKING:
    from harness.backends.base import Backend
    from harness.measuring.attribution import Joined
    from harness.measuring.workload import Workload
    from harness.planning.plan import Point

Progress = Callable[[str], None]
"""Called with a few words whenever something begins."""


@dataclass(slots=True)
class Timed:
    """A pass with instruments.

    Attributes:
        joined: the ranks' records of the window, None where nothing was timed.
        results: [rank][instrument] of what else the observers handed over.
    """

    name: str
    window: Window
    joined: Joined | None
    results: list[dict[str, Any]]


class Passes:
    """What has been measured of one point so far.

    Attributes:
        plain: the repeats, nothing attached; timed: the passes with observers, in order.
        profiles: what each rank's profiler saw; kernels: its communication kernels, joined.
        notes: what a reader must know; stop_reason: why the repeats ended.
    """

    def __init__(self, backend: Backend, point: Point, progress: Progress) -> None:
        self.backend, self.point, self.cfg = backend, point, point.cfg
        self.progress = progress
        self.plain: list[Window] = []
        self.timed: list[Timed] = []
        self.profiles: list[ProfileRecord] = []
        self.kernels: Joined | None = None
        self.notes: list[str] = []
        self.stop_reason: str | None = None

    @property
    def windows(self) -> list[Window]:
        return self.plain + [timed.window for timed in self.timed]

    def joined(self, *names: str) -> tuple[str, Joined] | None:
        """The first of the named passes that has joined records."""
        for timed in self.timed:
            if timed.name in names and timed.joined is not None:
                return timed.name, timed.joined
        return None

    @property
    def latency(self) -> tuple[str, Joined] | None:
        """The pass whose pairs are latencies; with one rank on a GPU, the step pass shows that
        there are no collectives."""
        solo = (pass_plan.STEP,) if self.backend.effective.get("tp") == 1 else ()
        return self.joined(*pass_plan.LATENCY, *solo)

    @property
    def clean(self) -> StepTimes | None:
        """Clean step times; None on a GPU without the step pass, where the host only enqueues, and
        of an engine that cannot tell."""
        if "step_us" in self.backend.lacks:
            return None
        if self.backend.effective.get("device") != "cuda":
            return StepTimes.of_windows(self.plain)
        found = self.joined(pass_plan.STEP)
        return None if found is None else StepTimes.of_joined(found[1], pass_plan.STEP)

    def step_times(self, name: str, joined: Joined) -> StepTimes:
        """Times of the steps of a pass, of which `joined` may be a part, taken as `clean` takes its
        own: an observer's pair on a CPU lies inside the step log's, and is not comparable."""
        if self.backend.effective.get("device") == "cuda":
            return StepTimes.of_joined(joined, name)
        return StepTimes.of_windows([t.window for t in self.timed if t.name == name])

    def run(self) -> tuple[str, str | None]:
        """-> (status, reason); raises where there is nothing to report but the failure."""
        from harness.measuring import workload

        wrong = differences(self.cfg, self.backend.effective)
        if wrong:
            raise MeasurementError(f"effective configuration differs: {'; '.join(wrong)}")
        asked = workload.build(
            self.cfg,
            vocab_size=self.backend.shape.vocab_size,
            max_model_len=int(self.backend.effective["max_model_len"]),
        )
        self.notes += self.backend.notes
        if asked.notes:
            self.notes.append(asked.notes)
        self.backend.reset_prefix_cache()
        self._warm_up(asked)
        self._repeat(asked)
        if self.backend.effective["device"] == "cpu":
            busy = busy_note((window.wall_s, window.telemetry) for window in self.plain)
            self.notes += [] if busy is None else [busy]
        self.notes += gpu_state.notes(self.plain, gpu_state.of_engine(self.backend.effective))
        self._check_batch(asked)
        self._instrument(asked)
        built = {w.pass_name: w.built for w in self.windows if w.built}
        if built:
            what = "; ".join(
                f"{name} pass: " + ", ".join(f"{k} +{v}" for k, v in counts.items())
                for name, counts in built.items()
            )
            return "contaminated", f"built inside the measured window: {what}"
        return "ok", None

    def _warm_up(self, asked: Workload) -> None:
        """The whole workload as it is measured, so that every shape of the window has run; and
        where requests arrive over time, once all together, which makes the largest batches."""
        times = self.cfg["measure"]["warmup"]
        for i in range(times):
            self.progress(f"warm-up {i + 1} of {times}")
            self._serve(asked, "warmup", i)
        if asked.arrivals_s is not None:
            self._serve(asked, "warmup", times, arrivals=False)

    def _repeat(self, asked: Workload) -> None:
        """Repeats until output_tok_s is steady or a limit is met, the minimum first."""
        plan = self.cfg["measure"]
        begin = time.perf_counter()
        while True:
            self.progress(f"repeat {len(self.plain) + 1} of {plan['min_repeats']} or more")
            window = self._serve(asked, "plain", len(self.plain))
            self.plain.append(window)
            check_outputs(window)
            self.stop_reason = stop(
                [w.output_tok_s for w in self.plain], time.perf_counter() - begin, plan
            )
            if self.stop_reason is not None:
                return

    def _instrument(self, asked: Workload) -> None:
        """One more repeat for each pass with observers; their speed counts nowhere."""
        missing = self.backend.lacks.get("latency_us")
        if missing is not None:
            if self.cfg["instrument"]:
                self.notes.append(f"instruments left out: {missing}")
            return
        planned, notes = pass_plan.plan(self.cfg, self.backend.effective)
        self.notes += notes
        for spec in planned:
            self._pass(asked, spec)
        self._match_kernels()

    def _pass(self, asked: Workload, spec: TimedPass) -> None:
        from harness.measuring import attribution, expected

        self.progress(f"pass {spec.name}: {', '.join(spec.factories)}")
        self.backend.attach(list(spec.factories.values()))
        try:
            if spec.warm:
                self._serve(asked, spec.name, 1)
            window = self._serve(asked, spec.name, 0)
        finally:
            results = self.backend.detach()
        of_rank = [dict(zip(spec.factories, rank, strict=True)) for rank in results]
        timed = Timed(spec.name, window, None, of_rank)
        self.timed.append(timed)  # evidence, even if what follows raises
        check_outputs(window)
        if "collectives" not in spec.factories:
            if "counts" in spec.factories:
                counts = [rank["counts"] for rank in of_rank]
                expected.check_counts(counts, window.steps[0], self.backend.shape)
            return
        if spec.warm:  # the records begin with the warm-up
            numbers = window.steps[0]["step"]
            for rank in of_rank:
                rank["collectives"] = rank["collectives"].of_steps(numbers)
        if "counts" in spec.factories:
            _check_counts([(r["counts"], r["collectives"]) for r in of_rank])
        timed.joined = attribution.join(
            [r["collectives"] for r in of_rank],
            spans=spec.spans,
            backlogs=[r["backlog"] for r in of_rank if "backlog" in r],
        )
        if spec.name != pass_plan.STEP:
            expected.check_expected(timed.joined, self.backend.shape)
        self._starved(timed)

    def _starved(self, timed: Timed) -> None:
        assert timed.joined is not None
        if not timed.joined.starved.any():
            return
        spin = max(rank["backlog"].spin_us for rank in timed.results)
        self.notes.append(
            f"{timed.name} pass: {int(timed.joined.starved.sum())} of {len(timed.joined.steps)} "
            f"steps starved (the host was not ahead of the GPU), left out; the backlog had grown "
            f"to {spin:.0f} us"
        )

    def _match_kernels(self) -> None:
        from harness.measuring import profile

        found = [timed for timed in self.timed if timed.name == pass_plan.PROFILER]
        if not found:
            return
        profiles = [rank["profiler"] for rank in found[0].results]
        errors = [f"rank {p.rank}: {p.error}" for p in profiles if p.error is not None]
        if errors:
            self.notes.append(f"profiler pass not used: {errors[0]}")
            return
        self.profiles = profiles
        if len(profiles) == 1:
            return
        pattern = self.joined(pass_plan.GRAPH, pass_plan.BACKLOG, pass_plan.SPAN)
        if pattern is None:
            self.notes.append(
                "collectives not told apart in the profiler pass: it needs instrument collectives "
                "beside it"
            )
            return
        try:
            self.kernels = profile.join_profiles(profiles, pattern[1])
        except profile.ProfileError as error:
            self.notes.append(f"profiler pass not used: {error}")

    def _serve(self, asked: Workload, pass_name: str, repeat: int, arrivals: bool = True) -> Window:
        return serve(
            self.backend,
            asked,
            point_id=self.point.point_id,
            pass_name=pass_name,
            repeat=repeat,
            arrivals=arrivals,
        )

    def _check_batch(self, asked: Workload) -> None:
        """A fixed batch must have decoded as one batch, or the point stands at a wrong place."""
        for window in self.plain:
            found = window.decode_batch
            if asked.fixed_batch is not None and found is not None and found != asked.fixed_batch:
                raise MeasurementError(
                    f"batch: asked for {asked.fixed_batch}, the engine decoded at most {found} "
                    "sequences together; give it more pages or a larger max_num_seqs"
                )


def stop(rates: list[float], wall_s: float, plan: Mapping[str, Any]) -> str | None:
    """Why to make no further repeat, or None: the minimum count comes first, then the standard
    deviation / median of output_tok_s, the number of repeats, the time."""
    if len(rates) < plan["min_repeats"]:
        return None
    noise = relative_noise(rates)
    if noise is not None and noise <= plan["rel_noise"]:
        return "noise"
    if len(rates) >= plan["max_repeats"]:
        return "max_repeats"
    return "wall_limit" if wall_s >= plan["wall_limit_s"] else None


def _check_counts(of_rank: list[tuple[CountRecord, RankRecord]]) -> None:
    """In steps that Python ran, as many must be counted as timed."""
    for counts, timed in of_rank:
        ran = [not timed.modes[step["mode"]].startswith("graph") for step in timed.steps]
        numbers = timed.steps["step"][np.array(ran, bool)]
        counted = sum(n for step in numbers.tolist() for n, _ in counts.steps[step].values())
        found = int(np.isin(timed.collectives["step"], numbers).sum())
        if counted != found:
            raise MeasurementError(
                f"rank {counts.rank}: {counted} collectives counted, {found} timed"
            )
