"""A tiny model on every rank of a world, and feeding sequences through it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from engine.comm import Communicator, SoloCommunicator
from engine.kernels import USUAL, Kernels
from engine.kv_cache import KVCache
from engine.models import Qwen3ForCausalLM
from engine.shape import ModelShape
from engine.weights import load_weights
from tests.support.batches import PagedSequences
from tests.support.threads import run_ranks

Step = dict[int, int]  # sequence -> how many of its next tokens


class LoneRank(SoloCommunicator):
    """A rank that never communicates: enough to build and load its shard."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        self.rank, self.world = rank, world


def build_model(
    path: Path, comm: Communicator, dtype: torch.dtype = torch.float32, kernels: Kernels = USUAL
) -> tuple[Qwen3ForCausalLM, ModelShape]:
    shape = ModelShape.from_hf(path)
    model = Qwen3ForCausalLM(shape, comm, "sdpa", shape.longest, dtype, "cpu", kernels)
    load_weights(model, path)
    return model, shape


def nan_model(path: Path, comm: Communicator, dtype: torch.dtype = torch.float32) -> Any:
    """A model of the checkpoint's shape in which nothing has been loaded."""
    model = Qwen3ForCausalLM(ModelShape.from_hf(path), comm, "sdpa", 64, dtype, "cpu")
    for parameter in model.parameters():
        parameter.fill_(float("nan"))
    return model


def loaded(path: Path, **how: Any) -> Any:
    """One rank's model with load_weights(path, **how)."""
    model = nan_model(path, SoloCommunicator())
    load_weights(model, path, **how)
    return model


def logits_of(
    path: Path,
    sequences: Sequence[Sequence[int]],
    steps: Iterable[Step],
    *,
    tp: int = 1,
    page_size: int = 4,
    padding: int = 0,
    dtype: torch.dtype = torch.float32,
    kernels: Kernels = USUAL,
) -> list[torch.Tensor]:
    """Logits [length, V] of every position of every sequence, fed step by step, from rank 0."""
    steps = list(steps)
    longest = max(map(len, sequences))

    def on_rank(comm: Communicator) -> list[torch.Tensor | None]:
        model, shape = build_model(path, comm, dtype, kernels)
        num_pages = len(sequences) * -(-longest // page_size)
        cache = KVCache(shape, comm.world, num_pages, page_size, dtype, "cpu")
        for layer in cache.layers:  # what nobody wrote must never be read
            for tensor in layer:
                tensor.fill_(float("nan"))
        fed = PagedSequences(model, cache, sequences)
        for step in steps:
            fed.step(step, padding)
        return [fed.result(i) for i in range(len(sequences))]

    root, *others = run_ranks(tp, on_rank)
    assert all(logits is None for rank in others for logits in rank)
    return [logits for logits in root if logits is not None]


def whole(lengths: Sequence[int]) -> list[Step]:
    """Every prompt in one step."""
    return [dict(enumerate(lengths))]


def chunked(size: int) -> Callable[[Sequence[int]], list[Step]]:
    """At most `size` tokens of every sequence a step; size 1 is prefill by decoding."""

    def steps(lengths: Sequence[int]) -> list[Step]:
        rounds = range(0, max(lengths), size)
        return [
            {i: min(size, n - done) for i, n in enumerate(lengths) if n > done} for done in rounds
        ]

    return steps


def staggered(lengths: Sequence[int]) -> list[Step]:
    """Prompts in chunks of 5 that begin one step apart; the last 6 tokens of each decode one by
    one, beside the chunks of later sequences."""
    done = [0] * len(lengths)
    steps: list[Step] = []
    while list(lengths) != done:
        step = {}
        for i, n in enumerate(lengths):
            if i <= len(steps) and done[i] < n:
                step[i] = min(5, n - 6 - done[i]) if n - 6 > done[i] else 1
                done[i] += step[i]
        steps.append(step)
    return steps
