"""LLM: how and when requests end, and that a bad one fails alone."""

from __future__ import annotations

import time

import pytest

from engine import FinishReason, SamplingParams
from tests.support.checkpoints import Checkpoints
from tests.support.engines import small_engine as engine
from tests.support.greedy import GREEDY, greedy_reference
from tests.support.prompts import PAGE, prompts_of


def test_eos_ends_a_request_and_ignore_eos_does_not(checkpoints: Checkpoints) -> None:
    path = checkpoints()
    prompts = prompts_of((4, 6, 8, 10, 12))
    params = SamplingParams(temperature=1.5, max_tokens=150, seed=3)
    with engine(path) as llm:
        ended = llm.generate(prompts, params)
        ignored = llm.generate(
            prompts, SamplingParams(temperature=1.5, max_tokens=150, seed=3, ignore_eos=True)
        )
    for short, long in zip(ended, ignored, strict=True):
        assert len(long.token_ids) == 150
        if 2 in long.token_ids:  # the checkpoint's EOS id
            stop = long.token_ids.index(2) + 1
            assert short.token_ids == long.token_ids[:stop]
            assert short.finish_reason is FinishReason.STOP
    assert any(o.finish_reason is FinishReason.STOP for o in ended)


def test_a_bad_request_fails_alone(checkpoints: Checkpoints) -> None:
    path = checkpoints()
    good = prompts_of((5, 7))
    prompts = [good[0], [1] * 64, [], [3, 97], good[1]]
    with engine(path, max_model_len=64) as llm:
        outputs = llm.generate(prompts, GREEDY)
    for output, prompt in ((outputs[0], good[0]), (outputs[4], good[1])):
        assert tuple(output.token_ids) == greedy_reference(path, tuple(prompt), 12)
    errors = [o.error for o in outputs[1:4]]
    assert all(o.finish_reason is FinishReason.ERROR for o in outputs[1:4])
    assert "64 tokens" in str(errors[0]) and "max_model_len=64" in str(errors[0])
    assert "no tokens" in str(errors[1])
    assert "97" in str(errors[2]) and "[0, 97)" in str(errors[2])


def test_a_request_larger_than_the_cache_fails_and_one_that_fits_runs(
    checkpoints: Checkpoints,
) -> None:
    path = checkpoints()
    small, large = prompts_of((6, 4 * PAGE))
    with engine(path, num_pages=4) as llm:
        outputs = llm.generate([large, small], GREEDY)
    assert outputs[0].finish_reason is FinishReason.ERROR
    assert "num_pages" in str(outputs[0].error)
    assert tuple(outputs[1].token_ids) == greedy_reference(path, tuple(small), 12)


def test_output_stops_at_max_model_len(checkpoints: Checkpoints) -> None:
    path = checkpoints()
    prompt = prompts_of((30,))[0]
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    with engine(path, max_model_len=40) as llm:
        output = llm.generate([prompt], params)[0]
    assert tuple(output.token_ids) == greedy_reference(path, tuple(prompt), 10)
    assert output.finish_reason is FinishReason.LENGTH


def test_times_of_a_request_are_consistent(checkpoints: Checkpoints) -> None:
    prompts = prompts_of((5, 9))
    begin = time.perf_counter()
    with engine(checkpoints()) as llm:
        outputs = llm.generate(prompts, GREEDY, arrivals_s=[0.0, 0.05])
    for output in outputs:
        times = output.token_times_s
        assert len(times) == 12 and list(times) == sorted(times)
        assert output.queue_s is not None and output.ttft_s is not None
        assert 0 <= output.queue_s <= output.ttft_s <= (output.e2e_s or 0)
        assert output.arrival_s >= begin
        assert output.tpot_s == pytest.approx((times[-1] - times[0]) / 11)
        assert output.arrival_s + output.ttft_s == pytest.approx(times[0])
    assert outputs[1].arrival_s - outputs[0].arrival_s == pytest.approx(0.05)
    assert outputs[1].token_times_s[0] > outputs[1].arrival_s
