"""Embedding and LM head, split by vocabulary rows.

Shapes: T tokens, H hidden, V vocabulary, N rows that need logits, n vocabulary rows of one rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from engine.comm.base import Communicator
from engine.comm.types import Site
from engine.parallel.linear import new_parameter
from engine.weights import CheckpointTensor, TensorSource


class VocabShard(nn.Module):
    """Rank r holds rows r*n .. r*n+n-1 of a [V, H] matrix, n = ceil(V / world); rows past V are
    zeros."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        comm: Communicator,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        shared_with: VocabShard | None = None,
    ) -> None:
        super().__init__()
        self.comm = comm
        self.vocab_size = vocab_size
        self.rows = -(-vocab_size // comm.world)
        self.start = comm.rank * self.rows
        self.owns_weight = shared_with is None
        self.weight: nn.Parameter = (
            new_parameter(self.rows, hidden_size, dtype=dtype, device=device)
            if shared_with is None
            else shared_with.weight
        )

    def checkpoint_tensors(self, path: str) -> dict[str, CheckpointTensor]:
        if not self.owns_weight:
            return {}
        count = min(self.rows, max(0, self.vocab_size - self.start))

        def fill(source: TensorSource) -> None:
            if count:
                self.weight[:count].copy_(source[self.start : self.start + count])
            self.weight[count:].zero_()

        shape = (self.vocab_size, self.weight.shape[1])
        return {f"{path}.weight": CheckpointTensor(shape, fill)}


class VocabParallelEmbedding(VocabShard):
    """Each rank looks up the ids that it owns; the sum over ranks is the embedding."""

    def partial(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids [T] -> this rank's summand [T, H]: zeros where another rank owns the id."""
        if self.comm.world == 1:  # six small kernels less at the head of a step
            return F.embedding(input_ids, self.weight)
        local = input_ids - self.start
        foreign = (local < 0) | (local >= self.rows)
        found = F.embedding(local.masked_fill(foreign, 0), self.weight)
        return found.masked_fill(foreign.unsqueeze(1), 0)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids [T] -> [T, H] on every rank; one all-reduce."""
        return self.comm.all_reduce(self.partial(input_ids), Site.EMBED)


class ParallelLMHead(VocabShard):
    """Logits of each rank's rows, gathered to rank 0. `shared_with` an embedding: tied weights, one
    storage."""

    def partial(self, hidden: torch.Tensor, logits_indices: torch.Tensor) -> torch.Tensor:
        """hidden [T, H], logits_indices [N] -> this rank's logits [N, n]; only N rows are
        projected."""
        return F.linear(hidden.index_select(0, logits_indices), self.weight)

    def forward(self, hidden: torch.Tensor, logits_indices: torch.Tensor) -> torch.Tensor | None:
        """-> [N, V] on rank 0, None on the others; one gather. With N = 0: None, and no gather."""
        if logits_indices.shape[0] == 0:
            return None
        logits = self.comm.gather(self.partial(hidden, logits_indices), Site.LM_HEAD)
        return None if logits is None else logits[:, : self.vocab_size]
