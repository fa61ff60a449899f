"""StepPlan: what a step's message says, and that it survives the way to another process."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields

import numpy as np
import pytest

from engine.comm.types import Phase
from engine.requests.request import Request
from engine.requests.sampling_params import SamplingParams
from engine.scheduling.step import ScheduledSeq, StepPlan
from engine.workers import RankChannels, _plan_sender


def make(name: str, prompt: list[int], slot: int, pages: list[int], **kwargs: object) -> Request:
    params = SamplingParams(temperature=0.5, max_tokens=8)
    request = Request(name, prompt, params, seed=2**62 + slot, arrival_s=0.0)
    request.slot, request.page_ids = slot, pages
    for key, value in kwargs.items():
        setattr(request, key, value)
    return request


def mixed() -> tuple[list[ScheduledSeq], StepPlan]:
    """A decode, a prompt chunk that ends nothing, and a whole prompt, with page size 4."""
    decode = make("d", [1, 2, 3], 5, [9, 4], output_ids=[30, 31], num_computed=4)
    decode.pages_sent = 1
    chunk = make("c", list(range(10, 20)), 0, [7, 8, 1], num_computed=4, pages_sent=3)
    whole = make("w", [40, 41], 2, [3])
    seqs = [
        ScheduledSeq(decode, 4, 1, True, token_on_device=True),
        ScheduledSeq(chunk, 4, 3, False),
        ScheduledSeq(whole, 0, 2, True),
    ]
    return seqs, StepPlan.from_schedule(17, seqs)


def test_columns() -> None:
    _, plan = mixed()
    assert plan.step == 17
    assert plan.slots.tolist() == [5, 0, 2]
    assert plan.starts.tolist() == [4, 4, 0]
    assert plan.query_lens.tolist() == [1, 3, 2]
    assert plan.samples.tolist() == [True, False, True]
    # The decode's input is the token that its slot sampled last: the ranks have it.
    assert plan.token_ids.tolist() == [-1, 14, 15, 16, 40, 41]
    assert plan.temperatures.tolist() == [0.5, 0.5, 0.5]
    assert plan.seeds.tolist() == [2**62 + 5, 2**62, 2**62 + 2]
    assert (plan.num_seqs, plan.num_tokens, plan.num_decodes) == (3, 6, 1)


def test_only_pages_that_the_ranks_do_not_know_are_sent() -> None:
    seqs, plan = mixed()
    assert plan.page_starts.tolist() == [1, 3, 0]
    assert plan.page_counts.tolist() == [1, 0, 1]
    assert plan.pages.tolist() == [4, 3]
    assert [seq.request.pages_sent for seq in seqs] == [2, 3, 1]
    again = StepPlan.from_schedule(18, seqs)
    assert again.page_counts.tolist() == [0, 0, 0]
    assert again.pages.tolist() == []
    seqs[0].request.page_ids.append(6)
    assert StepPlan.from_schedule(19, seqs).pages.tolist() == [6]


def test_a_recomputed_request_sends_its_tokens() -> None:
    """After a preemption no rank holds the last token, though tokens have been generated."""
    request = make("r", [1, 2, 3], 1, [0, 1], output_ids=[30, 31])
    plan = StepPlan.from_schedule(0, [ScheduledSeq(request, 0, 5, True)])
    assert plan.token_ids.tolist() == [1, 2, 3, 30, 31]
    # Even when the prefix cache leaves one token to compute.
    plan = StepPlan.from_schedule(0, [ScheduledSeq(request, 4, 1, True)])
    assert plan.token_ids.tolist() == [31]
    assert plan.page_starts.tolist() == [2]


def test_a_one_token_chunk_of_a_prompt_sends_its_token() -> None:
    request = make("r", [1, 2, 3], 1, [0])
    plan = StepPlan.from_schedule(0, [ScheduledSeq(request, 1, 1, False)])
    assert plan.token_ids.tolist() == [2]
    assert plan.phase is Phase.PREFILL


def test_phase() -> None:
    seqs, plan = mixed()
    assert plan.phase is Phase.MIXED
    assert StepPlan.from_schedule(0, seqs[:1]).phase is Phase.DECODE
    assert StepPlan.from_schedule(0, seqs[1:]).phase is Phase.PREFILL


@pytest.mark.parametrize("size", [0, 1, 2, 3])
def test_round_trip(size: int) -> None:
    seqs, _ = mixed()
    for seq in seqs:
        seq.request.pages_sent = 0
    plan = StepPlan.from_schedule(2**40, seqs[:size])
    back = StepPlan.from_bytes(plan.to_bytes())
    assert back.step == 2**40 and back.plain
    for field in fields(StepPlan)[2:]:
        sent, received = getattr(plan, field.name), getattr(back, field.name)
        assert received.dtype == sent.dtype, field.name
        np.testing.assert_array_equal(received, sent, err_msg=field.name)


def test_a_long_prompt_fits_one_message() -> None:
    """300,000 ids: a fixed buffer of 1 MiB, as elsewhere, would not hold them."""
    prompt = list(range(300_000))
    request = make("long", prompt, 0, list(range(18_750)))
    plan = StepPlan.from_schedule(0, [ScheduledSeq(request, 0, len(prompt), True)])
    message = plan.to_bytes()
    assert 2_400_000 < len(message) < 2_500_000
    back = StepPlan.from_bytes(message)
    np.testing.assert_array_equal(back.token_ids, np.arange(300_000))
    np.testing.assert_array_equal(back.pages, np.arange(18_750))


def test_the_way_to_the_other_ranks_has_no_size() -> None:
    """A pipe that a thread empties while rank 0 writes, and no shared memory, so that neither a
    chunk's size nor that of /dev/shm bounds a step."""
    mine, other = multiprocessing.Pipe()
    prompt = list(range(300_000))
    request = make("long", prompt, 0, list(range(18_750)))
    plan = StepPlan.from_schedule(0, [ScheduledSeq(request, 0, len(prompt), True)])
    with ThreadPoolExecutor(1) as threads:
        message = threads.submit(other.recv_bytes)
        _plan_sender(RankChannels(mine, None, [mine]))(plan)
        received = message.result()
    assert received[:1] == b"S"
    np.testing.assert_array_equal(StepPlan.from_bytes(received[1:]).token_ids, prompt)


@pytest.mark.parametrize("cut", [1, 8, 60])
def test_a_message_that_lost_its_end_is_refused(cut: int) -> None:
    _, plan = mixed()
    with pytest.raises(ValueError, match="buffer"):
        StepPlan.from_bytes(plan.to_bytes()[:-cut])


def test_a_message_with_more_than_its_header_says_is_refused() -> None:
    _, plan = mixed()
    message = plan.to_bytes()
    with pytest.raises(ValueError, match=f"of {len(message) + 1} bytes: its header says"):
        StepPlan.from_bytes(message + b"\0")


def test_a_message_without_a_whole_header_is_refused() -> None:
    with pytest.raises(ValueError, match="of 40 bytes"):
        StepPlan.from_bytes(b"\0" * 40)
