"""Hand-made forwards: sequences, positions and pages -> ForwardBatch; logits by position."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from engine.inputs.batch import ForwardBatch
from engine.kv_cache import KVCache
from engine.models import Qwen3ForCausalLM

POISON = 10**6  # where nothing may be read: no valid token, page, row or length


@dataclass(frozen=True)
class Rows:
    """Query tokens of one sequence, at positions start, start+1, ..., and the sequence's pages."""

    token_ids: Sequence[int]
    start: int
    page_ids: Sequence[int]
    samples: bool = True


def build_batch(
    rows: Sequence[Rows],
    page_size: int,
    *,
    max_num_seqs: int = 8,
    max_pages: int = 64,
    padded_to: int | None = None,
    dummy_slot: int = POISON,
    logits_of_all: bool = False,
) -> ForwardBatch:
    """One forward over `rows`, decoding sequences first; every entry that does not count is POISON.

    Args:
        padded_to: rows of the forward; those past the last token write their K/V to `dummy_slot`.
        logits_of_all: ask for the logits of every row, not of the last row of those that sample.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    cu_seqlens, seq_lens, wanted = [0], [], []
    for seq in rows:
        stop = seq.start + len(seq.token_ids)
        token_ids += seq.token_ids
        positions += range(seq.start, stop)
        slots += (
            seq.page_ids[p // page_size] * page_size + p % page_size for p in range(seq.start, stop)
        )
        cu_seqlens.append(len(token_ids))
        seq_lens.append(stop)
        if seq.samples:
            wanted.append(len(token_ids) - 1)
    if logits_of_all:
        wanted = list(range(len(token_ids)))
    padding = (padded_to or len(token_ids)) - len(token_ids)
    decodes = [len(seq.token_ids) == 1 and seq.start > 0 for seq in rows]
    num_decodes = decodes.index(False) if False in decodes else len(decodes)
    assert not any(decodes[num_decodes:]), "decoding sequences come first"
    tables = torch.full((max_num_seqs, max_pages), POISON, dtype=torch.int32)
    for i, seq in enumerate(rows):
        tables[i, : len(seq.page_ids)] = torch.tensor(seq.page_ids, dtype=torch.int32)
    longest = max(len(seq.token_ids) for seq in rows)
    meta = [len(rows), longest, max(seq_lens), num_decodes]
    return ForwardBatch(
        input_ids=_front(token_ids + [0] * padding, torch.int64),
        positions=_front(positions + [0] * padding, torch.int64),
        slot_mapping=_front(slots + [dummy_slot] * padding, torch.int64),
        cu_seqlens_q=_whole(cu_seqlens, max_num_seqs + 1),
        cu_seqlens_k=_whole([0, *accumulate(seq_lens)], max_num_seqs + 1),
        seq_lens=_whole(seq_lens, max_num_seqs),
        block_tables=tables,
        host_meta=torch.tensor(meta, dtype=torch.int32),
        logits_indices=_front(wanted, torch.int64),
    )


def _front(values: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """The front of a bigger buffer, as the engine's inputs are."""
    buffer = torch.full((len(values) + 7,), POISON, dtype=dtype)
    buffer[: len(values)] = torch.tensor(values, dtype=dtype)
    return buffer[: len(values)]


def _whole(values: Sequence[int], width: int) -> torch.Tensor:
    buffer = torch.full((width,), POISON, dtype=torch.int32)
    buffer[: len(values)] = torch.tensor(values, dtype=torch.int32)
    return buffer


class PagedSequences:
    """Feeds sequences to a model in pieces, over pages scattered at random, and keeps every logit.

    On ranks other than 0 there are no logits to keep.
    """

    def __init__(
        self, model: Qwen3ForCausalLM, kv_cache: KVCache, sequences: Sequence[Sequence[int]]
    ) -> None:
        self.model, self.kv_cache = model, kv_cache
        self.sequences = [list(s) for s in sequences]
        self.done = [0] * len(sequences)
        page_size = kv_cache.page_size
        free = list(range(kv_cache.num_pages))
        random.Random(0).shuffle(free)
        self.pages = [[free.pop() for _ in range(-(-len(s) // page_size))] for s in sequences]
        self.logits: list[list[torch.Tensor]] = [[] for _ in sequences]

    def step(self, counts: dict[int, int], padding: int = 0) -> None:
        """Runs one forward over the next counts[i] tokens of each sequence i, decodes first."""
        order = sorted(counts, key=lambda i: not (counts[i] == 1 and self.done[i] > 0))
        rows = []
        for i in order:
            start = self.done[i]
            self.done[i] = start + counts[i]
            rows.append(Rows(self.sequences[i][start : self.done[i]], start, self.pages[i]))
        batch = build_batch(
            rows,
            self.kv_cache.page_size,
            padded_to=sum(counts.values()) + padding,
            dummy_slot=self.kv_cache.dummy_slot,
            logits_of_all=True,
        )
        hidden = self.model(batch, self.kv_cache)
        logits = self.model.compute_logits(hidden, batch)
        if logits is not None:
            for i, part in zip(order, logits.split([counts[i] for i in order]), strict=True):
                self.logits[i].append(part)

    def result(self, i: int) -> torch.Tensor | None:
        """Logits [length, V] of sequence i, or None where this rank has none."""
        assert self.done[i] == len(self.sequences[i])
        return torch.cat(self.logits[i]) if self.logits[i] else None
