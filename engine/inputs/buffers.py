"""Preallocated inputs of the forward, filled from a StepPlan on each rank alike."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.inputs.batch import ForwardBatch
from engine.inputs.mirror import Mirror
from engine.scheduling.step import StepPlan


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """What the sampler needs of the N sequences that sample; tensors on the device, all [N].

    Attributes:
        slots: int64, where the sampled ids go in the last-token buffer.
        temperatures: float32; seeds: int64.
        positions: int64, position of the token being sampled.
        all_greedy: known on the host: every temperature is 0, so no noise need be made.
    """

    slots: torch.Tensor
    temperatures: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor
    all_greedy: bool


class BatchBuffers:
    """One rank's static inputs, its copy of the block tables, and the last sampled token by slot.

    A decode step that is padded to a bucket of rows (CUDA graphs) gets rows that belong to no
    sequence: they read and write the dummy page, attend to one key there, and sample into a dummy
    slot. In a step with prompts they are prompts of their own on the dummy page, which sample
    nothing; for one of them there is room beside max_num_seqs sequences.

    Args:
        dummy_page: a page that no block table names.

    Attributes:
        last_tokens: [max_num_seqs + 1] int64 on the device, so that a decoding sequence's input id
            need not pass through the host; the last entry is the dummy slot.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        page_size: int,
        dummy_page: int,
        device: torch.device,
    ) -> None:
        self._page_size, self._max_model_len = page_size, max_model_len
        self._dummy_page = dummy_page
        self._dummy_slot = max_num_seqs
        pages = -(-max_model_len // page_size)
        self._tables = np.zeros((max_num_seqs, pages), np.int32)  # by slot
        seqs = (max_num_seqs,)
        layout: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "cu_seqlens_q": ((max_num_seqs + 2,), torch.int32),
            "cu_seqlens_k": ((max_num_seqs + 2,), torch.int32),
            "seq_lens": ((max_num_seqs + 1,), torch.int32),
            "logits_indices": (seqs, torch.int64),
            "known_rows": (seqs, torch.int64),
            "known_slots": (seqs, torch.int64),
            "sample_slots": (seqs, torch.int64),
            "sample_positions": (seqs, torch.int64),
            "seeds": (seqs, torch.int64),
            "temperatures": (seqs, torch.float32),
            "block_tables": ((max_num_seqs + 1, pages), torch.int32),
        }
        self._mirror = Mirror(layout, max_num_batched_tokens, device)
        self.last_tokens = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device)

    def fill(self, plan: StepPlan) -> tuple[ForwardBatch, SamplingRows]:
        """Lays out one forward and fetches the input ids that stand on the device."""
        meta, known = self.load(plan, plan.num_tokens)
        greedy = not plan.temperatures.any()
        batch, rows = self.views(plan.num_tokens, int(plan.samples.sum()), meta, greedy)
        if known:
            self.fetch_known(batch.input_ids, known)
        return batch, rows

    def load(
        self, plan: StepPlan, rows: int, seqs: int | None = None
    ) -> tuple[tuple[int, int, int, int], int]:
        """Applies the plan's new pages to the block tables and brings its arrays to the device,
        padded to `rows` rows if that is more than its tokens, and with `seqs` to so many sequences
        that sample and one of padding (without it every sequence of a padded step must decode).
        Returns (host_meta, number of input ids that stand on the device).

        Work on the host is a fixed number of numpy calls over S sequences, T tokens and the new
        pages; it does not grow with the context but for the copy of S rows of the block tables.
        """
        slots, starts, lens = plan.slots, plan.starts, plan.query_lens
        self._apply_pages(plan)
        self._mirror.turn()
        arrays, num_seqs = self._mirror.arrays, plan.num_seqs
        ends = np.cumsum(lens, dtype=np.int64)
        seq_of_token = np.repeat(np.arange(num_seqs), lens)
        positions = np.arange(plan.num_tokens) - (ends - lens)[seq_of_token] + starts[seq_of_token]
        page, offset = np.divmod(positions, self._page_size)
        token_arrays, _ = self._mirror.token_arrays(rows)
        token_arrays[0, : plan.num_tokens] = np.maximum(plan.token_ids, 0)
        token_arrays[1, : plan.num_tokens] = positions
        token_arrays[2, : plan.num_tokens] = (
            self._tables[slots[seq_of_token], page].astype(np.int64) * self._page_size + offset
        )
        seq_lens = starts + lens
        arrays["cu_seqlens_q"][1 : num_seqs + 1] = ends
        arrays["cu_seqlens_k"][1 : num_seqs + 1] = np.cumsum(seq_lens)
        arrays["seq_lens"][:num_seqs] = seq_lens
        arrays["block_tables"][:num_seqs] = self._tables[slots]
        sampling = np.flatnonzero(plan.samples)
        known = np.flatnonzero(plan.token_ids < 0)
        count = len(sampling)
        arrays["logits_indices"][:count] = ends[sampling] - 1
        arrays["sample_slots"][:count] = slots[sampling]
        arrays["sample_positions"][:count] = seq_lens[sampling]
        arrays["seeds"][:count] = plan.seeds[sampling]
        arrays["temperatures"][:count] = plan.temperatures[sampling]
        arrays["known_rows"][: len(known)] = known
        arrays["known_slots"][: len(known)] = slots[seq_of_token[known]]
        if seqs is not None:
            self._pad_prompts(num_seqs, count, plan.num_tokens, token_arrays[:, :rows], seqs)
            self._mirror.upload(rows, seqs + 1)
        else:
            padding = rows - plan.num_tokens
            if padding:
                assert len(known) == num_seqs, "only steps that decode are padded"
                self._pad(num_seqs, rows, token_arrays)
            self._mirror.upload(rows, num_seqs + padding)
        meta = (num_seqs, int(lens.max()), int(seq_lens.max()), plan.num_decodes)
        return meta, len(known)

    def views(
        self, tokens: int, samples: int, meta: tuple[int, int, int, int], all_greedy: bool
    ) -> tuple[ForwardBatch, SamplingRows]:
        """The device tensors of a forward of `tokens` rows of which `samples` sample, at addresses
        that depend on these two numbers alone; `meta` as ForwardBatch.host_meta, `all_greedy` as
        in SamplingRows."""
        tensors = self._mirror.tensors
        input_ids, positions, slot_mapping = self._mirror.token_arrays(tokens)[1][:, :tokens]
        batch = ForwardBatch(
            input_ids=input_ids,
            positions=positions,
            slot_mapping=slot_mapping,
            cu_seqlens_q=tensors["cu_seqlens_q"],
            cu_seqlens_k=tensors["cu_seqlens_k"],
            seq_lens=tensors["seq_lens"],
            block_tables=tensors["block_tables"],
            host_meta=torch.tensor(meta, dtype=torch.int32),
            logits_indices=tensors["logits_indices"][:samples],
        )
        return batch, self.rows(samples, all_greedy)

    def rows(self, samples: int, all_greedy: bool) -> SamplingRows:
        """The device tensors of the first `samples` sequences that sample."""
        tensors = self._mirror.tensors
        return SamplingRows(
            slots=tensors["sample_slots"][:samples],
            temperatures=tensors["temperatures"][:samples],
            seeds=tensors["seeds"][:samples],
            positions=tensors["sample_positions"][:samples],
            all_greedy=all_greedy,
        )

    def fetch_known(self, input_ids: torch.Tensor, count: int) -> None:
        """Puts the last sampled tokens of `count` sequences into their rows of input_ids."""
        tensors = self._mirror.tensors
        tokens = self.last_tokens.index_select(0, tensors["known_slots"][:count])
        input_ids.index_copy_(0, tensors["known_rows"][:count], tokens)

    def input_ids(self, tokens: int) -> torch.Tensor:
        """[tokens] on the device, as in the `views` of so many."""
        return self._mirror.token_arrays(tokens)[1][0, :tokens]

    def fill_padding(self, rows: int, seqs: int | None = None) -> None:
        """Lays out a step of `rows` rows that all belong to no sequence; `seqs` as in load()."""
        token_arrays = self._mirror.token_arrays(rows)[0][:, :rows]
        if seqs is None:
            self._pad(0, rows, token_arrays)
        else:
            self._pad_prompts(0, 0, 0, token_arrays, seqs)
        self._mirror.upload(rows, rows if seqs is None else seqs + 1)

    def _pad(self, num_seqs: int, bucket: int, token_arrays: np.ndarray) -> None:
        arrays, padding = self._mirror.arrays, slice(num_seqs, bucket)
        token_arrays[0:2, padding] = 0
        token_arrays[2, padding] = self._dummy_page * self._page_size
        arrays["seq_lens"][padding] = 1
        arrays["block_tables"][padding] = self._dummy_page
        arrays["logits_indices"][padding] = arrays["known_rows"][padding] = np.arange(
            num_seqs, bucket
        )
        arrays["sample_slots"][padding] = arrays["known_slots"][padding] = self._dummy_slot
        arrays["sample_positions"][padding] = 0
        arrays["seeds"][padding] = 0
        arrays["temperatures"][padding] = 0.0

    def _pad_prompts(
        self, num_seqs: int, samples: int, tokens: int, token_arrays: np.ndarray, seqs: int
    ) -> None:
        """Rows from `tokens` on are prompts of up to max_model_len tokens, sequences past those are
        empty."""
        arrays, longest = self._mirror.arrays, self._max_model_len
        left = token_arrays.shape[1] - tokens
        positions = np.arange(left) % longest
        token_arrays[0, tokens:] = 0
        token_arrays[1, tokens:] = positions
        token_arrays[2, tokens:] = self._dummy_page * self._page_size + positions % self._page_size
        lens = np.clip(left - longest * np.arange(seqs + 1 - num_seqs), 0, longest)
        assert lens.sum() == left, "more rows of padding than their sequences take"
        ends = np.cumsum(lens)
        arrays["seq_lens"][num_seqs : seqs + 1] = lens
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            arrays[name][num_seqs + 1 : seqs + 2] = arrays[name][num_seqs] + ends
        arrays["block_tables"][num_seqs : seqs + 1] = self._dummy_page
        arrays["sample_slots"][samples:seqs] = self._dummy_slot
        for name in ("logits_indices", "sample_positions", "seeds", "temperatures"):
            arrays[name][samples:seqs] = 0

    def _apply_pages(self, plan: StepPlan) -> None:
        counts = plan.page_counts
        if not len(plan.pages):
            return
        row = np.repeat(plan.slots, counts)
        first = np.repeat(np.cumsum(counts) - counts, counts)
        column = np.arange(len(plan.pages)) - first + np.repeat(plan.page_starts, counts)
        self._tables[row, column] = plan.pages
