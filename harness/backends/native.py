"""The engine of this repository."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from harness.machine.models import resolve_model
from harness.settings.config import ENGINE_AXES

if TYPE_CHECKING:
    import numpy as np

    from engine.comm.types import ObserverFactory
    from engine.config import EngineConfig
    from engine.llm import LLM
    from engine.requests.request import RequestOutput
    from engine.requests.sampling_params import SamplingParams
    from engine.shape import ModelShape


def engine_config(cfg: dict[str, Any], cache_dir: str | Path | None) -> EngineConfig:
    """A resolved configuration -> EngineConfig; the only place where one becomes the other. What is
    null is left to the engine's default.

    Raises:
        ConfigError, ModelError: a value that the engine refuses, a model that cannot be found.
    """
    from engine.config import EngineConfig

    options = {name: cfg[name] for name in ENGINE_AXES}
    options |= {name: value for name, value in cfg["engine"].items() if value is not None}
    if "max_num_seqs" not in options:
        options["max_num_seqs"] = cfg["batch"]
    return EngineConfig(
        model=str(resolve_model(cfg["model"])),
        load_format=cfg["model"]["load_format"],
        cache_dir=None if cache_dir is None else str(cache_dir),
        **options,
    )


def startup(of_engine: dict[str, float | None], total_s: float) -> dict[str, float | None]:
    """Start-up by phase, of one or of many ranks alike: what the engine says of its phases, and as
    spawn_s whatever else went by until it was ready."""
    phases = {k: v for k, v in of_engine.items() if k not in ("spawn_s", "total_s")}
    return {**phases, "spawn_s": total_s - sum(filter(None, phases.values())), "total_s": total_s}


class NativeBackend:
    """harness.backends.base.Backend over engine.LLM, which it forwards to."""

    name = "native"
    lacks: Mapping[str, str] = MappingProxyType({})
    notes: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.points_served = 0
        self._llm: LLM | None = None
        self._startup: dict[str, float | None] = {}

    @property
    def llm(self) -> LLM:
        if self._llm is None:
            raise RuntimeError("the backend was not started, or is closed")
        return self._llm

    @property
    def startup(self) -> dict[str, float | None]:
        return dict(self._startup)

    @property
    def effective(self) -> dict[str, Any]:
        return self.llm.effective

    @property
    def shape(self) -> ModelShape:
        return self.llm.shape

    def start(
        self, cfg: dict[str, Any], cache_dir: str | Path | None, since_s: float | None = None
    ) -> None:
        begin = time.perf_counter() if since_s is None else since_s
        from engine.llm import LLM

        if self._llm is not None:
            raise RuntimeError("the backend was started already; close it first")
        self._llm = LLM(engine_config(cfg, cache_dir))
        self._startup = startup(self._llm.startup, time.perf_counter() - begin)
        self.points_served = 0

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        arrivals_s: Sequence[float] | None = None,
    ) -> list[RequestOutput]:
        return self.llm.generate(prompts, params, arrivals_s)

    def attach(self, factories: Sequence[ObserverFactory]) -> None:
        self.llm.attach(factories)

    def detach(self) -> list[list[Any]]:
        return self.llm.detach()

    def drain_steps(self) -> list[np.ndarray]:
        return self.llm.drain_steps()

    def counters(self) -> dict[str, int]:
        return self.llm.counters()

    def memory(self) -> list[dict[str, int | None]]:
        return self.llm.memory()

    def captures(self) -> list[tuple[int, float, int]]:
        return self.llm.captures()

    def reset_prefix_cache(self) -> None:
        self.llm.reset_prefix_cache()

    def close(self) -> None:
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.close()
