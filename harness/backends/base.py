"""What the harness needs of an engine; one small file a backend implements it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np

    from engine.comm.types import ObserverFactory
    from engine.requests.request import RequestOutput
    from engine.requests.sampling_params import SamplingParams
    from engine.shape import ModelShape


class Backend(Protocol):
    """One engine, alive between `start` and `close`, measured by any number of points.

    Times are `time.perf_counter()` seconds or nanoseconds, comparable between processes of a host.

    Attributes:
        name: as chosen in the configuration.
        points_served: points measured since the start; the first one paid for it.
        startup: seconds by phase: load_s, compile_s, capture_s, warmup_s, total_s, and spawn_s,
            which is the rest of the total: processes, imports, connections. None where unknown.
        effective: the configuration read back from the engine, what `auto` became included.
        shape: the model's shape.
        lacks: figures (harness/tables/figures.py) that the engine cannot give -> why; they are null
            whatever its step log says. Where latency_us is among them no observer is attached;
            where step_us is, the log's begin_ns and end_ns are no times of a forward.
        notes: what a reader must know of every point.
    """

    name: str
    lacks: Mapping[str, str]
    notes: tuple[str, ...]
    points_served: int

    @property
    def startup(self) -> dict[str, float | None]: ...

    @property
    def effective(self) -> dict[str, Any]: ...

    @property
    def shape(self) -> ModelShape: ...

    def start(
        self, cfg: dict[str, Any], cache_dir: str | Path | None, since_s: float | None = None
    ) -> None:
        """Starts the engine that a point's resolved configuration asks for.

        Args:
            cache_dir: holds the compile caches; None: torch's default.
            since_s: perf_counter when the process that calls this was started, so that interpreter
                and imports count as start-up; None: this call.
        """
        ...

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        arrivals_s: Sequence[float] | None = None,
    ) -> list[RequestOutput]:
        """Serves the requests, in order; `arrivals_s` are offsets from the call."""
        ...

    def attach(self, factories: Sequence[ObserverFactory]) -> None:
        """Puts observers on every rank."""
        ...

    def detach(self) -> list[list[Any]]:
        """Takes them off: `[rank][observer]` -> its result."""
        ...

    def drain_steps(self) -> list[np.ndarray]:
        """Steps since the last call, one structured array a rank: step, phase (0 prefill, 1 decode,
        2 mixed), batch, tokens, bucket, samples, replayed, begin_ns, end_ns, wall_begin_ns,
        wall_end_ns."""
        ...

    def counters(self) -> dict[str, int]:
        """Ever-growing counts, summed over ranks: compiles, graph_breaks, captures, triton_builds,
        scheduled_steps, preemptions, cached_tokens."""
        ...

    def memory(self) -> list[dict[str, int | None]]:
        """Bytes by name, one dict a rank."""
        ...

    def captures(self) -> list[tuple[int, float, int]]:
        """(bucket, seconds, bytes) of each CUDA graph captured at start-up, in order."""
        ...

    def reset_prefix_cache(self) -> None: ...

    def close(self) -> None:
        """Ends the engine and its processes; repeatable."""
        ...
