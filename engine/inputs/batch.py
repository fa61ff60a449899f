"""ForwardBatch: the tensors of one forward, passed explicitly, views on kept buffers.

T query tokens, S sequences, N of them sampling. Rows of a sequence are adjacent; sequences that
decode (one query token) come first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Inputs of one forward on one rank.

    What only the attention reads has the full width of its buffer: its sizes never change, so
    compiled code depends on T alone; `host_meta` says how much of it counts. host_meta lives on
    the CPU whatever the device, because a number read from it must not stall the GPU, and it is a
    tensor because dynamo would specialise on the values of Python integers.

    Attributes:
        input_ids: [T] int64.
        positions: [T] int64, position of each token in its sequence.
        slot_mapping: [T] int64, page * page_size + offset where the token's K/V goes.
        cu_seqlens_q: [max_num_seqs + 2] int32, start row of each sequence; entries 0..S count.
        cu_seqlens_k: [max_num_seqs + 2] int32, cumulative seq_lens from 0; entries 0..S count.
        seq_lens: [max_num_seqs + 1] int32, keys each sequence attends to at its last row (K/V
            written in this step included); a chunk that ends at position p-1 has p, however long
            the prompt is.
        block_tables: [max_num_seqs + 1, max_pages] int32, pages in order of position; row entries
            past ceil(seq_len / page_size) are arbitrary.
        host_meta: [4] int32 on the CPU: S, max query length, max seq_len, number of sequences that
            decode (they come first).
        logits_indices: [N] int64, rows whose logits are wanted: the last row of each sequence that
            samples in this step (a sequence in an unfinished prompt chunk samples nothing).
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    host_meta: torch.Tensor
    logits_indices: torch.Tensor
