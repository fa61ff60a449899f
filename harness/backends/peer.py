"""What the engines of others have in common: they are seen from outside alone."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from engine.execution.steplog import STEP_DTYPE

if TYPE_CHECKING:
    import numpy as np

    from engine.comm.types import ObserverFactory
    from engine.requests.request import RequestOutput
    from engine.requests.sampling_params import SamplingParams
    from engine.shape import ModelShape

PHASES = ("spawn_s", "load_s", "compile_s", "capture_s", "warmup_s", "total_s")
_SEAM = "no observer is heard at its collectives"
_CLOCK = "its forward is not timed apart from the rest of a step"
NO_SEAM = {
    **dict.fromkeys(
        ("latency_us", "transfer_us", "wait_us", "comm_share", "transfer_share", "wait_share"),
        _SEAM,
    ),
    **dict.fromkeys(("step_us", "mbu", "mfu"), _CLOCK),
}
"""What none of them can give, and why."""


class Peer:
    """harness.backends.base.Backend but for `start`, `generate` and `close`, which each has.

    Attributes:
        effective, startup: filled by `start`.
    """

    name = ""
    lacks: Mapping[str, str] = {}
    notes: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.points_served = 0
        self.effective: dict[str, Any] = {}
        self.startup: dict[str, float | None] = {}
        self._shape: ModelShape | None = None
        self._rows: list[tuple[int, ...]] = []
        self._steps = 0

    @property
    def shape(self) -> ModelShape:
        assert self._shape is not None, "not started"
        return self._shape

    def attach(self, factories: Sequence[ObserverFactory]) -> None:
        raise RuntimeError(f"backend={self.name}: {_SEAM}")

    def detach(self) -> list[list[Any]]:
        return []

    def log_step(
        self, *, phase: int, batch: int, tokens: int, bucket: int, samples: int,
        begin_s: float, end_s: float, replayed: bool = False,
    ) -> None:  # fmt: skip
        """Adds a step as it is seen from outside; times are perf_counter seconds."""
        wall = (int(begin_s * 1e9), int(end_s * 1e9))
        row = (self._steps, phase, batch, tokens, bucket, samples, replayed, *wall, *wall)
        self._rows.append(row)
        self._steps += 1

    def drain_steps(self) -> list[np.ndarray]:
        import numpy as np

        rows, self._rows = self._rows, []
        return [np.array(rows, STEP_DTYPE)]

    def counters(self) -> dict[str, int]:
        return {}

    def captures(self) -> list[tuple[int, float, int]]:
        return []

    def reset_prefix_cache(self) -> None: ...


def check(name: str, params: Sequence[SamplingParams]) -> None:
    """Raises ValueError where a request asks for more than a temperature and a length: what a peer
    would leave out in silence."""
    from engine.requests.sampling_params import SamplingParams

    for own in set(params):
        plain = SamplingParams(
            temperature=own.temperature, max_tokens=own.max_tokens, ignore_eos=True
        )
        if own != plain:
            raise ValueError(
                f"backend={name}: {own} asks for more than temperature, max_tokens and ignore_eos"
            )


def output(
    number: int,
    prompt: Sequence[int],
    tokens: Sequence[int],
    *,
    arrival_s: float,
    begin_s: float | None,
    times_s: Sequence[float],
    first_s: float | None = None,
    last_s: float | None = None,
    preemptions: int | None = 0,
    cached_tokens: int | None = 0,
    error: str | None = None,
) -> RequestOutput:
    """A served request; perf_counter seconds throughout.

    Args:
        begin_s: of the first step that held it; None: not known.
        times_s: of each token; where there are none, first_s and last_s are of the first and last.
        preemptions, cached_tokens: None: not known of one request. (The native engine, whose type
            this is, always knows.)
    """
    from engine.requests.request import FinishReason, RequestOutput

    n = len(tokens)
    first, last = (times_s[0], times_s[-1]) if times_s else (first_s, last_s)
    spread = None if first is None or last is None or n < 2 else (last - first) / (n - 1)
    return RequestOutput(
        request_id=f"#{number}",
        prompt_token_ids=list(prompt),
        token_ids=list(tokens),
        text=None,
        finish_reason=FinishReason.LENGTH if error is None else FinishReason.ERROR,
        error=error,
        arrival_s=arrival_s,
        queue_s=None if begin_s is None else begin_s - arrival_s,
        ttft_s=None if first is None else first - arrival_s,
        tpot_s=spread,
        e2e_s=None if last is None else last - arrival_s,
        token_times_s=tuple(times_s),
        preemptions=cast(int, preemptions),
        cached_tokens=cast(int, cached_tokens),
    )


def peak_resident_bytes() -> int | None:
    """This process's peak resident set; None where the system does not tell (not Linux). Not
    getrusage: its ru_maxrss survives exec, so a spawned process would report its parent's peak."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)


def use_cache_dir(cache_dir: str | Path | None) -> None:
    """Where torch and Triton keep what they compile, in this process and its children; before the
    engine is imported."""
    if cache_dir is not None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(cache_dir) / "inductor")
        os.environ["TRITON_CACHE_DIR"] = str(Path(cache_dir) / "triton")
