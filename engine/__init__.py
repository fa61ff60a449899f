"""A Qwen3 engine: paged K/V, continuous batching, tensor parallelism, observed collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.async_llm import AsyncLLM
    from engine.comm import (
        Collective,
        CollectiveObserver,
        Communicator,
        Kind,
        ObserverContext,
        ObserverFactory,
        Phase,
        Site,
        SoloCommunicator,
        StepInfo,
    )
    from engine.config import EngineConfig
    from engine.errors import CheckpointError, ConfigError, EngineDeadError, RequestError
    from engine.frontend.call import StreamUpdate
    from engine.llm import LLM
    from engine.ranks.nodes import under_torchrun
    from engine.requests.request import FinishReason, RequestOutput, TokenLogprobs
    from engine.requests.sampling_params import SamplingParams
    from engine.shape import ModelShape

_HOMES = {
    "engine.async_llm": ("AsyncLLM",),
    "engine.frontend.call": ("StreamUpdate",),
    "engine.comm": (
        "Collective",
        "CollectiveObserver",
        "Communicator",
        "Kind",
        "ObserverContext",
        "ObserverFactory",
        "Phase",
        "Site",
        "SoloCommunicator",
        "StepInfo",
    ),
    "engine.config": ("EngineConfig",),
    "engine.errors": ("CheckpointError", "ConfigError", "EngineDeadError", "RequestError"),
    "engine.llm": ("LLM",),
    "engine.ranks.nodes": ("under_torchrun",),
    "engine.requests.request": ("FinishReason", "RequestOutput", "TokenLogprobs"),
    "engine.requests.sampling_params": ("SamplingParams",),
    "engine.shape": ("ModelShape",),
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "CheckpointError",
    "Collective",
    "CollectiveObserver",
    "Communicator",
    "ConfigError",
    "EngineConfig",
    "EngineDeadError",
    "FinishReason",
    "Kind",
    "ModelShape",
    "ObserverContext",
    "ObserverFactory",
    "Phase",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "Site",
    "SoloCommunicator",
    "StepInfo",
    "StreamUpdate",
    "TokenLogprobs",
    "under_torchrun",
]


def __getattr__(name: str) -> Any:
    """Public names are imported at first use: torch takes seconds, EngineConfig needs none."""
    for module, names in _HOMES.items():
        if name in names:
            import importlib

            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
