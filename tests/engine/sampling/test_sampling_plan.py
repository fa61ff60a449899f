"""SamplingPlan: what rank 0 is told of a mixed step, number by number."""

from __future__ import annotations

import numpy as np
import torch

from engine.requests.request import Request, TokenLogprobs
from engine.requests.sampling_params import SamplingParams
from engine.sampling.plan import SamplingPlan
from engine.scheduling.step import ScheduledSeq, StepPlan

EOS = (2, 3)
VOCAB = 100


def make(prompt: list[int], output: list[int], slot: int, **params: object) -> Request:
    request = Request("r", prompt, SamplingParams(**params), seed=0, arrival_s=0.0)  # type: ignore[arg-type]
    request.output_ids, request.slot, request.page_ids = output, slot, [slot]
    request.token_on_device = bool(output)
    return request


def decode(request: Request) -> ScheduledSeq:
    return ScheduledSeq(request, request.num_tokens - 1, 1, True, request.token_on_device)


def test_columns() -> None:
    plain = make([1, 2], [9], 0)
    filtered = make([1, 2], [9], 1, top_p=0.9, min_p=0.1)
    penalised = make([4, 5], [6], 2, repetition_penalty=1.2, frequency_penalty=0.5, logprobs=2)
    fresh = make([7, 8, 7], [], 3, presence_penalty=0.25, temperature=0, top_k=3)
    biased = make([1], [9, 9], 4, logit_bias={10: -1.5, 11: 2.0}, min_tokens=3, stop_token_ids=[40])
    chunk = make([1, 2, 3], [], 5, top_k=4)
    narrow = make([1, 2], [9], 6, top_k=20, logprobs=0)
    seqs = [decode(r) for r in (plain, filtered, penalised, biased)]
    seqs += [ScheduledSeq(chunk, 0, 2, False), ScheduledSeq(fresh, 0, 3, True), decode(narrow)]
    plan = SamplingPlan.from_schedule(seqs, VOCAB, EOS)
    # Rows: plain 0, filtered 1, penalised 2, biased 3, fresh 4, narrow 5; the chunk has none.
    expected = {
        "filter_rows": [5, 1], "top_k": [20, VOCAB], "top_p": [1.0, 0.9], "min_p": [0.0, 0.1],
        "penalty_rows": [2, 4], "repetition": [1.2, 1.0], "presence": [0.0, 0.25],
        "frequency": [0.5, 0.0], "fresh_slots": [3], "prompt_slots": [3, 3, 3],
        "prompt_tokens": [7, 8, 7], "output_slots": [], "output_tokens": [],
        "bias_rows": [3, 3], "bias_tokens": [10, 11], "biases": [-1.5, 2.0],
        "mask_rows": [3, 3, 3], "mask_tokens": [2, 3, 40], "logprob_rows": [2, 5],
    }  # fmt: skip
    assert {
        name: sorted(a) if "mask" in name else a.tolist() for name, a in plan.arrays.items()
    } == (expected)
    assert (plan.logprob_requests, plan.logprob_tops) == ([penalised, narrow], [2, 0])
    on_device = plan.on(torch.device("cpu"))
    for name, values in plan.arrays.items():
        assert on_device[name].numpy().dtype == values.dtype
        np.testing.assert_array_equal(on_device[name].numpy(), values)
    step = StepPlan.from_schedule(0, seqs)
    assert not step.plain and not step.says_all


def test_a_step_of_plain_rows_needs_no_plan() -> None:
    seqs = [
        decode(make([1, 2], [9], 0)),
        decode(make([1, 2], [9, 9], 1, min_tokens=1)),  # they are generated
        decode(make([1, 2], [9], 2, temperature=0, top_p=0.5)),
        ScheduledSeq(make([1, 2, 3], [], 3, top_k=4), 0, 2, False),  # samples later
    ]
    assert StepPlan.from_schedule(0, seqs).says_all


def test_a_request_that_comes_back_brings_its_tokens() -> None:
    back = make([4, 5], [6, 7], 2, repetition_penalty=1.2)
    back.token_on_device = False
    plan = SamplingPlan.from_schedule([ScheduledSeq(back, 0, 4, True)], VOCAB, EOS)
    assert plan.arrays["fresh_slots"].tolist() == [2]
    assert plan.arrays["prompt_tokens"].tolist() == [4, 5]
    assert plan.arrays["output_tokens"].tolist() == [6, 7]


def test_eos_may_be_sampled_where_it_is_ignored() -> None:
    request = make([1], [9], 0, min_tokens=5, ignore_eos=True, stop_token_ids=[40])
    plan = SamplingPlan.from_schedule([decode(request)], VOCAB, EOS)
    assert plan.arrays["mask_tokens"].tolist() == [40]


def test_rows_of_prompts() -> None:
    """Each prompt token but the last says what the one behind it is worth, once."""
    decoding = make([1, 2], [9], 0)
    whole = make([20, 21, 22], [], 1, prompt_logprobs=4)
    middle = make(list(range(30, 40)), [], 2, prompt_logprobs=0)
    again = make([50, 51, 52, 53, 54], [60], 3, prompt_logprobs=1)
    again.prompt_logprobs = [TokenLogprobs(51, 0.0, 1, ())] * 2
    silent = make([70, 71], [], 4)
    seqs = [
        decode(decoding),  # row 0
        ScheduledSeq(middle, 4, 3, False),  # rows 1 to 3, positions 4 to 6
        ScheduledSeq(again, 0, 6, True),  # rows 4 to 9; positions 0 and 1 are known, 3 is the last
        ScheduledSeq(silent, 0, 2, True),  # rows 10 and 11
        ScheduledSeq(whole, 0, 3, True),  # rows 12 to 14
    ]
    plan = SamplingPlan.from_schedule(seqs, VOCAB, EOS)
    step = StepPlan.from_schedule(0, seqs)
    assert step.prompt_rows.tolist() == [1, 2, 3, 6, 7, 12, 13]
    assert plan.next_tokens.tolist() == [35, 36, 37, 53, 54, 21, 22]
    assert plan.prompt_tops == [0, 0, 0, 1, 1, 4, 4]
    assert plan.prompt_requests == [(middle, 3), (again, 2), (whole, 2)]
    assert step.plain and not step.says_all
    assert all(len(values) == 0 for values in plan.arrays.values())


def test_what_a_prompt_may_take_from_the_cache() -> None:
    request = make(list(range(10)), [], 0, prompt_logprobs=1)
    assert request.num_cacheable == 0
    request.prompt_logprobs = [TokenLogprobs(1, 0.0, 1, ())] * 4
    assert request.num_cacheable == 4  # position 4 must be computed: it says what 5 is worth
    request.prompt_logprobs *= 2
    request.prompt_logprobs.append(TokenLogprobs(9, 0.0, 1, ()))
    assert request.num_cacheable == 9
    assert make([1, 2, 3], [4], 0).num_cacheable == 3
