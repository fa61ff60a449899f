"""How a forward runs: eager, or compiled by layer or as a whole. One signature: run(batch)."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch

from engine.batch import ForwardBatch
from engine.kv_cache import KVCache
from engine.models.qwen import Qwen3ForCausalLM


class EagerExecution:
    """The model as written."""

    mode = "eager"

    def __init__(self, model: Qwen3ForCausalLM, kv_cache: KVCache) -> None:
        self._model = model
        self._kv_cache = kv_cache

    def run(self, batch: ForwardBatch) -> torch.Tensor:
        """-> hidden states [T, H]."""
        return self._model(batch, self._kv_cache)

    def warmup_sizes(self) -> tuple[int, ...]:
        """Token counts whose first run is not like the others'."""
        return (1,)


class CompiledExecution(EagerExecution):
    """torch.compile with fullgraph: `layer` makes each decoder layer one region, `model` everything
    from the embedding to the final norm.

    Two graphs serve all sizes: one with a symbolic token count and one for a single token, which
    torch specialises on. Collectives and attention are opaque operators in both.
    """

    def __init__(self, model: Qwen3ForCausalLM, kv_cache: KVCache, scope: str) -> None:
        super().__init__(model, kv_cache)
        self.mode = f"compiled-{scope}"
        regions = list(model.model.layers) if scope == "layer" else [model.model]
        for region in regions:
            region.compile(fullgraph=True, dynamic=True)

    def warmup_sizes(self) -> tuple[int, ...]:
        return (2, 1)


def build(model: Qwen3ForCausalLM, kv_cache: KVCache, scope: str) -> EagerExecution:
    """scope: off | layer | model."""
    if scope == "off":
        return EagerExecution(model, kv_cache)
    return CompiledExecution(model, kv_cache, scope)


def compile_counters() -> dict[str, int]:
    """Counts of this process since it started: graphs compiled, graph breaks, cache hits.

    All zero in a process that never touched dynamo; importing it only to read zeros would cost a
    second.
    """
    names = ("compiles", "graph_breaks", "cache_hits", "cache_misses")
    if "torch._dynamo.utils" not in sys.modules:
        return dict.fromkeys(names, 0)
    counters: dict[str, Any] = importlib.import_module("torch._dynamo.utils").counters
    return {
        "compiles": counters["stats"]["unique_graphs"],
        "graph_breaks": sum(counters["graph_break"].values()),
        "cache_hits": counters["inductor"]["fxgraph_cache_hit"],
        "cache_misses": counters["inductor"]["fxgraph_cache_miss"],
    }
