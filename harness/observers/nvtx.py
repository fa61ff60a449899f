"""NVTX ranges of steps and collectives, for a profiler that records them."""

from __future__ import annotations

from typing import Any

from engine.comm.types import Collective, CollectiveObserver, ObserverContext, Phase, StepInfo

NVTX_DOMAIN = "engine"
REPLAY = "replay"


def range_name(phase: str, replayed: bool) -> str:
    """What a step is called: prefill, decode, mixed; as a graph's replay replay-prefill, replay
    (which decodes), replay-mixed."""
    if not replayed:
        return phase
    return REPLAY if phase == Phase.DECODE else f"{REPLAY}-{phase}"


class NvtxObserver(CollectiveObserver):
    """Ranges in the domain `engine`: `kind/site` with the kind as category and bytes as payload;
    `step/NAME`, NAME as `range_name` has it, with the batch as payload.

    `annotate` is `nvtx.annotate` or a stand-in of that signature. Its objects are built once a
    distinct range and reused: on an H200 host 0.27 us a range instead of 0.9.
    """

    def __init__(self, context: ObserverContext, annotate: Any = None) -> None:
        if annotate is None:
            import nvtx

            annotate = nvtx.annotate
        self._annotate = annotate
        self._ranges: dict[tuple[Any, ...], Any] = {}
        self._pushed = 0

    def step_begin(self, step: StepInfo) -> None:
        self._pushed += 1
        self._of_step(step).__enter__()

    def step_end(self, step: StepInfo) -> None:
        self._of_step(step).__exit__(None, None, None)

    def before(self, collective: Collective) -> None:
        self._pushed += 1
        self._of(collective).__enter__()

    def after(self, collective: Collective) -> None:
        self._of(collective).__exit__(None, None, None)

    def result(self) -> int:
        """Number of ranges opened."""
        return self._pushed

    def _of_step(self, step: StepInfo) -> Any:
        return self._range(f"step/{range_name(step.phase, step.replayed)}", "step", step.batch)

    def _of(self, collective: Collective) -> Any:
        key = (collective.kind, collective.site, collective.bytes)
        found = self._ranges.get(key)
        if found is None:
            message = f"{collective.kind.label}/{collective.site.label}"
            found = self._build(key, message, collective.kind.label, collective.bytes)
        return found

    def _range(self, message: str, category: str, payload: int) -> Any:
        key = (message, payload)
        return self._ranges.get(key) or self._build(key, message, category, payload)

    def _build(self, key: tuple[Any, ...], message: str, category: str, payload: int) -> Any:
        built = self._annotate(
            message=message, domain=NVTX_DOMAIN, category=category, payload=payload
        )
        self._ranges[key] = built
        return built


def nvtx_missing() -> str | None:
    """Why NVTX ranges cannot be recorded here; None if they can."""
    try:
        import nvtx  # noqa: F401
    except ImportError:
        return "the package nvtx is not installed"
    return None
