"""Preallocated inputs of the forward, filled from a StepPlan on each rank alike."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.batch import ForwardBatch
from engine.step import StepPlan


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """What the sampler needs of the N sequences that sample; tensors on the device, all [N].

    Attributes:
        slots: int64, where the sampled ids go in the last-token buffer.
        temperatures: float32; seeds: int64.
        positions: int64, position of the token being sampled.
    """

    slots: torch.Tensor
    temperatures: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor


class _Buffer:
    """A host array and its device tensor: one memory on a CPU, pinned and copied on a GPU."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._host = torch.zeros(shape, dtype=dtype, pin_memory=on_gpu)
        self._device = self._host.to(device, copy=True) if on_gpu else self._host
        self.array: np.ndarray = self._host.numpy()

    def put(self, values: np.ndarray) -> torch.Tensor:
        """Writes `values` to the front; returns that part on the device."""
        n = len(values)
        self.array[:n] = values
        if self._device is not self._host:
            # Safe to reuse the pinned side: a step's ids are read back before the next is filled.
            self._device[:n].copy_(self._host[:n], non_blocking=True)
        return self._device[:n]

    @property
    def whole(self) -> torch.Tensor:
        return self._device


class BatchBuffers:
    """One rank's static inputs, its copy of the block tables, and the last sampled token by slot.

    Attributes:
        last_tokens: [max_num_seqs] int64 on the device, so that a decoding sequence's input id need
            not pass through the host.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        page_size: int,
        device: torch.device,
    ) -> None:
        self._page_size = page_size
        seqs, tokens = max_num_seqs, max_num_batched_tokens
        pages = -(-max_model_len // page_size)
        int64, int32 = torch.int64, torch.int32
        self._tables = np.zeros((seqs, pages), np.int32)  # by slot
        self._input_ids = _Buffer((tokens,), int64, device)
        self._positions = _Buffer((tokens,), int64, device)
        self._slot_mapping = _Buffer((tokens,), int64, device)
        self._cu_seqlens_q = _Buffer((seqs + 1,), int32, device)
        self._seq_lens = _Buffer((seqs,), int32, device)
        self._block_tables = _Buffer((seqs, pages), int32, device)
        self._logits_indices = _Buffer((seqs,), int64, device)
        self._row_slots = _Buffer((seqs,), int64, device)
        self._row_indices = _Buffer((seqs,), int64, device)
        self._sample_slots = _Buffer((seqs,), int64, device)
        self._temperatures = _Buffer((seqs,), torch.float32, device)
        self._seeds = _Buffer((seqs,), int64, device)
        self._sample_positions = _Buffer((seqs,), int64, device)
        self._host_meta = torch.zeros(4, dtype=int32)
        self.last_tokens = torch.zeros(seqs, dtype=int64, device=device)

    def fill(self, plan: StepPlan) -> tuple[ForwardBatch, SamplingRows]:
        """Applies the plan's new pages to the block tables and lays out one forward.

        Work on the host is a fixed number of numpy calls over S sequences, T tokens and the new
        pages; it does not grow with the context but for the copy of S rows of the block tables.
        """
        slots, starts, lens = plan.slots, plan.starts, plan.query_lens
        self._apply_pages(plan)
        ends = np.cumsum(lens, dtype=np.int64)
        firsts = ends - lens
        seq_of_token = np.repeat(np.arange(plan.num_seqs), lens)
        positions = np.arange(plan.num_tokens) - firsts[seq_of_token] + starts[seq_of_token]
        page, offset = np.divmod(positions, self._page_size)
        slot_mapping = (
            self._tables[slots[seq_of_token], page].astype(np.int64) * self._page_size + offset
        )
        self._cu_seqlens_q.put(np.concatenate([[0], ends]))
        self._seq_lens.put(starts + lens)
        self._block_tables.put(self._tables[slots])
        meta = (plan.num_seqs, int(lens.max()), int((starts + lens).max()), plan.num_decodes)
        self._host_meta = torch.tensor(meta, dtype=torch.int32)
        sampling = np.flatnonzero(plan.samples)
        batch = ForwardBatch(
            input_ids=self._fill_input_ids(plan, seq_of_token),
            positions=self._positions.put(positions),
            slot_mapping=self._slot_mapping.put(slot_mapping),
            cu_seqlens_q=self._cu_seqlens_q.whole,
            seq_lens=self._seq_lens.whole,
            block_tables=self._block_tables.whole,
            host_meta=self._host_meta,
            logits_indices=self._logits_indices.put(ends[sampling] - 1),
        )
        rows = SamplingRows(
            slots=self._sample_slots.put(slots[sampling]),
            temperatures=self._temperatures.put(plan.temperatures[sampling]),
            seeds=self._seeds.put(plan.seeds[sampling]),
            positions=self._sample_positions.put((starts + lens)[sampling]),
        )
        return batch, rows

    def _apply_pages(self, plan: StepPlan) -> None:
        counts = plan.page_counts
        if not len(plan.pages):
            return
        row = np.repeat(plan.slots, counts)
        first = np.repeat(np.cumsum(counts) - counts, counts)
        column = np.arange(len(plan.pages)) - first + np.repeat(plan.page_starts, counts)
        self._tables[row, column] = plan.pages

    def _fill_input_ids(self, plan: StepPlan, seq_of_token: np.ndarray) -> torch.Tensor:
        input_ids = self._input_ids.put(np.maximum(plan.token_ids, 0))
        rows = np.flatnonzero(plan.token_ids < 0)
        if len(rows):
            slots = self._row_slots.put(plan.slots[seq_of_token[rows]])
            input_ids.index_copy_(0, self._row_indices.put(rows), self.last_tokens[slots])
        return input_ids
