"""The passes of one point: warm-up, plain repeats until they are steady, one with instruments."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from harness.effective import differences
from harness.records import CountRecord, HostRecord
from harness.stats import relative_noise
from harness.window import MeasurementError, Window, check_outputs, serve

if TYPE_CHECKING:
    from harness.attribution import Joined
    from harness.backends.base import Backend
    from harness.plan import Point
    from harness.workload import Workload

Progress = Callable[[str], None]
"""Called with a few words whenever something begins."""

INSTRUMENTED = "host"


class Passes:
    """What has been measured of one point so far.

    Attributes:
        plain: the repeats, nothing attached; instrumented: the one with observers.
        joined: the ranks' records of it, None where collectives were not timed.
        notes: what a reader must know; stop_reason: why the repeats ended.
    """

    def __init__(self, backend: Backend, point: Point, progress: Progress) -> None:
        self.backend, self.point, self.cfg = backend, point, point.cfg
        self.progress = progress
        self.plain: list[Window] = []
        self.instrumented: Window | None = None
        self.joined: Joined | None = None
        self.notes: list[str] = []
        self.stop_reason: str | None = None

    @property
    def windows(self) -> list[Window]:
        return self.plain + ([self.instrumented] if self.instrumented is not None else [])

    def run(self) -> tuple[str, str | None]:
        """-> (status, reason); raises where there is nothing to report but the failure."""
        from harness import workload

        wrong = differences(self.cfg, self.backend.effective)
        if wrong:
            raise MeasurementError(f"effective configuration differs: {'; '.join(wrong)}")
        asked = workload.build(
            self.cfg,
            vocab_size=self.backend.shape.vocab_size,
            max_model_len=int(self.backend.effective["max_model_len"]),
        )
        if asked.notes:
            self.notes.append(asked.notes)
        self.backend.reset_prefix_cache()
        self._warm_up(asked)
        self._repeat(asked)
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
        times = max(1, self.cfg["measure"]["warmup"])
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
        """One more repeat with observers attached, a pass of its own whose speed counts nowhere."""
        from harness import attribution, observers

        wanted = self._usable_instruments()
        if not wanted:
            return
        self.progress(f"with instruments: {', '.join(wanted)}")
        factories = observers.factories(wanted)
        self.backend.attach(list(factories.values()))
        try:
            window = self._serve(asked, INSTRUMENTED, 0)
        finally:
            results = self.backend.detach()
        self.instrumented = window
        check_outputs(window)
        of_rank = [dict(zip(factories, rank, strict=True)) for rank in results]
        if "counts" in factories and "collectives" in factories:
            _check_counts([(r["counts"], r["collectives"]) for r in of_rank])
        if "collectives" in factories:
            self.joined = attribution.join([r["collectives"] for r in of_rank])
            attribution.check_expected(self.joined, self.backend.shape)

    def _usable_instruments(self) -> list[str]:
        from harness import observers

        wanted = list(self.cfg["instrument"])
        missing = observers.nvtx_missing() if "nvtx" in wanted else None
        if missing:
            wanted.remove("nvtx")
            self.notes.append(f"instrument nvtx left out: {missing}")
        if "collectives" in wanted:
            if self.cfg["timing"] != "host":
                raise MeasurementError(
                    f"timing={self.cfg['timing']}: this version times by the host's clock only; "
                    "set timing=host"
                )
            if self.backend.effective.get("device") == "cuda":
                wanted.remove("collectives")
                self.notes.append(
                    "instrument collectives left out: on a GPU the host's clock times the launch, "
                    "not the collective"
                )
        return wanted

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


def _check_counts(of_rank: list[tuple[CountRecord, HostRecord]]) -> None:
    for counts, timed in of_rank:
        counted = sum(n for step in counts.steps.values() for n, _ in step.values())
        if counted != len(timed.collectives):
            raise MeasurementError(
                f"rank {counts.rank}: {counted} collectives counted, {len(timed.collectives)} timed"
            )
