"""How a forward runs: eager, or compiled by layer or as a whole. One signature: run(batch)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from engine.inputs.batch import ForwardBatch
from engine.kv_cache import KVCache
from engine.models.qwen import Qwen3ForCausalLM


class EagerExecution:
    """The model as written.

    Attributes:
        warmup_sizes: token counts to run once before serving, because their first run differs.
    """

    mode = "eager"
    warmup_sizes: tuple[int, ...] = (1,)

    def __init__(self, model: Qwen3ForCausalLM, kv_cache: KVCache) -> None:
        self._model = model
        self._kv_cache = kv_cache

    def run(self, batch: ForwardBatch) -> torch.Tensor:
        """-> hidden states [T, H]."""
        return self._model(batch, self._kv_cache)

    def warmed_up(self) -> None:
        """Called once, after the warm-up sizes have run."""

    def close(self) -> None:
        """Called before the model is freed."""


class CompiledExecution(EagerExecution):
    """torch.compile with fullgraph: `layer` makes each decoder layer one region, `model` everything
    from the embedding to the final norm.

    A region has two graphs: one whose token count is a symbol and one for a single token, since
    torch specialises on 1. The number of pages is a symbol too, because it depends on the memory
    that happens to be free, and a compile cache should not. Every other size stays a constant, so
    symbols are marked by hand while warming up: `dynamic=True` would make symbols of all, and tie
    any two that happen to be equal.
    Collectives and attention are opaque operators in both.
    """

    def __init__(self, model: Qwen3ForCausalLM, kv_cache: KVCache, scope: str) -> None:
        super().__init__(model, kv_cache)
        # A size that no marked dimension shares: equal symbols would be taken for one.
        self.warmup_sizes = (2 if kv_cache.num_pages + 1 != 2 else 3, 1)
        self.mode = f"compiled-{scope}"
        regions = list(model.model.layers) if scope == "layer" else [model.model]
        self._compiled: dict[nn.Module, Callable[..., Any]] = {}
        for region in regions:
            self._compiled[region] = torch.compile(region.forward, fullgraph=True)
            region.forward = partial(_marked, self._compiled[region])

    def warmed_up(self) -> None:
        for region, compiled in self._compiled.items():
            region.forward = compiled

    def close(self) -> None:
        """Drops the process's compiled code: it hangs on the model's code objects, and the ninth
        compiled engine of one process would pass dynamo's recompile limit, an error under
        fullgraph. Another compiled engine alive beside this one compiles again."""
        torch._dynamo.reset()


def _marked(compiled: Callable[..., Any], *args: Any) -> Any:
    """Marks the leading dimension of what has a row a token and of the caches, then calls."""
    batch = next(a for a in args if isinstance(a, ForwardBatch))
    tokens = len(batch.slot_mapping)
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    caches = [pair for a in args if isinstance(a, KVCache) for pair in a.layers]
    of_tokens = [batch.input_ids, batch.positions, batch.slot_mapping]
    of_tokens += [t for t in tensors if t.shape[0] == tokens]
    of_pages = [t for pair in caches for t in pair] + [t for t in tensors if t.ndim == 4]
    for tensor in of_pages + (of_tokens if tokens > 1 else []):
        torch._dynamo.mark_dynamic(tensor, 0)
    return compiled(*args)


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
