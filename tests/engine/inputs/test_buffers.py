"""BatchBuffers: the tensors of a step, number by number, from plans of two steps."""

from __future__ import annotations

import numpy as np
import torch

from engine.inputs.buffers import BatchBuffers
from engine.requests.request import Request
from engine.requests.sampling_params import SamplingParams
from engine.scheduling.step import ScheduledSeq, StepPlan

DUMMY_PAGE = 99


def buffers() -> BatchBuffers:
    return BatchBuffers(
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_model_len=12,
        page_size=4,
        dummy_page=DUMMY_PAGE,
        device=torch.device("cpu"),
    )


def request(prompt: list[int], slot: int, pages: list[int], **params: float) -> Request:
    sampling = SamplingParams(**{"temperature": 0.0, **params})  # type: ignore[arg-type]
    made = Request("r", prompt, sampling, seed=100 + slot, arrival_s=0.0)
    made.slot, made.page_ids = slot, pages
    return made


def two_steps(buffers: BatchBuffers) -> tuple[Request, Request, StepPlan]:
    """A prompt of 5 in slot 2 and of 7 in slot 0, of which 6 tokens are computed."""
    a = request([10, 11, 12, 13, 14], 2, [7, 3])
    b = request([20, 21, 22, 23, 24, 25, 26], 0, [5, 1], temperature=0.5)
    seqs = [ScheduledSeq(a, 0, 5, True), ScheduledSeq(b, 0, 6, False)]
    return a, b, StepPlan.from_schedule(0, seqs)


def test_a_prefill_step() -> None:
    own = buffers()
    batch, rows = own.fill(two_steps(own)[2])
    assert batch.input_ids.tolist() == [10, 11, 12, 13, 14, 20, 21, 22, 23, 24, 25]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5]
    assert batch.slot_mapping.tolist() == [28, 29, 30, 31, 12, 20, 21, 22, 23, 4, 5]
    assert batch.cu_seqlens_q[:3].tolist() == [0, 5, 11]
    assert batch.cu_seqlens_k[:3].tolist() == [0, 5, 11]
    assert batch.seq_lens[:2].tolist() == [5, 6]
    assert batch.block_tables[:2, :2].tolist() == [[7, 3], [5, 1]]
    assert batch.host_meta.tolist() == [2, 6, 6, 0]
    assert batch.logits_indices.tolist() == [4]
    assert rows.slots.tolist() == [2] and rows.positions.tolist() == [5]
    assert rows.seeds.tolist() == [102] and rows.temperatures.tolist() == [0.0]


def mixed_step(own: BatchBuffers) -> StepPlan:
    """Slot 2 decodes its 6th position from the device; slot 0 computes its last prompt token."""
    a, b, first = two_steps(own)
    own.fill(first)
    own.last_tokens[2] = 77
    a.output_ids.append(77)
    seqs = [ScheduledSeq(a, 5, 1, True, True), ScheduledSeq(b, 6, 1, True)]
    return StepPlan.from_schedule(1, seqs)


def test_a_mixed_step_takes_the_last_token_from_the_device() -> None:
    own = buffers()
    plan = mixed_step(own)
    assert len(plan.pages) == 0  # the ranks know them already
    batch, rows = own.fill(plan)
    assert batch.input_ids.tolist() == [77, 26]
    assert batch.positions.tolist() == [5, 6]
    assert batch.slot_mapping.tolist() == [3 * 4 + 1, 1 * 4 + 2]
    assert batch.cu_seqlens_k[:3].tolist() == [0, 6, 13]
    assert batch.host_meta.tolist() == [2, 1, 7, 2]
    assert rows.slots.tolist() == [2, 0] and rows.positions.tolist() == [6, 7]
    assert rows.temperatures.tolist() == [0.0, 0.5] and not rows.all_greedy


def test_padding_reads_and_writes_what_belongs_to_nobody() -> None:
    own = buffers()
    a, b, first = two_steps(own)
    own.fill(first)
    own.last_tokens[2], own.last_tokens[0] = 77, 66
    for seq, token in ((a, 77), (b, 66)):
        seq.output_ids.append(token)
    plan = StepPlan.from_schedule(
        1, [ScheduledSeq(a, 5, 1, True, True), ScheduledSeq(b, 7, 1, True, True)]
    )
    own.load(plan, 4)
    batch, rows = own.views(4, 4, (4, 1, 12, 4), all_greedy=False)
    own.fetch_known(batch.input_ids, 4)
    assert batch.slot_mapping.tolist()[2:] == [DUMMY_PAGE * 4] * 2
    assert batch.seq_lens.tolist()[2:4] == [1, 1]
    assert batch.block_tables[2:4].unique().tolist() == [DUMMY_PAGE]
    assert rows.slots.tolist()[2:] == [4, 4]  # the dummy entry of last_tokens
    assert batch.logits_indices.tolist() == [0, 1, 2, 3]
    assert batch.positions.tolist() == [5, 7, 0, 0]
    assert batch.input_ids.tolist() == [77, 66, 0, 0]


def test_arrays_start_aligned_and_token_counts_do_not_collide() -> None:
    own = buffers()
    for tokens in range(1, 17):
        batch, _ = own.views(tokens, 1, (1, 1, 1, 1), all_greedy=True)
        for tensor in (batch.input_ids, batch.positions, batch.slot_mapping, batch.block_tables):
            assert tensor.data_ptr() % 16 == 0
            assert tensor.storage_offset() > 1  # 0 and 1 are constants to torch.compile
        batch.input_ids.fill_(1)
        batch.positions.fill_(2)
        batch.slot_mapping.fill_(3)
        batch.cu_seqlens_q.fill_(4)
        assert batch.input_ids.unique().tolist() == [1]
        assert batch.positions.unique().tolist() == [2]
        assert batch.slot_mapping.unique().tolist() == [3]


def test_a_second_prompt_in_a_slot_overwrites_the_pages_of_the_first() -> None:
    own = buffers()
    own.fill(two_steps(own)[2])
    again = request([1, 2, 3], 2, [8])
    plan = StepPlan.from_schedule(2, [ScheduledSeq(again, 0, 3, True)])
    batch, _ = own.fill(plan)
    assert batch.block_tables[0, 0].item() == 8
    assert batch.slot_mapping.tolist() == [32, 33, 34]
    assert np.array_equal(plan.token_ids, [1, 2, 3])
