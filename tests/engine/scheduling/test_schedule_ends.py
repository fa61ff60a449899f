"""Scheduler: how requests end, and those that it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.errors import RequestError
from engine.requests.request import FinishReason
from engine.requests.sampling_params import SamplingParams
from tests.support.scheduling import EOS, Engine


def test_eos_is_kept_and_ends_a_request_unless_ignored() -> None:
    engine = Engine()
    plain = engine.add("plain", 3, SamplingParams(max_tokens=3))
    deaf = engine.add("deaf", 3, SamplingParams(max_tokens=3, ignore_eos=True))
    engine.step(token=7)
    engine.step(token=EOS)
    assert (plain.finish_reason, plain.output_ids) == (FinishReason.STOP, [7, EOS])
    assert plain.token_times_s == [1.0, 2.0]
    assert plain.finished_s == 2.0
    assert deaf.finish_reason is None
    engine.step(token=EOS)
    assert (deaf.finish_reason, deaf.output_ids) == (FinishReason.LENGTH, [7, EOS, EOS])


def test_the_models_length_ends_a_request() -> None:
    """max_model_len=512, prompt 500, max_tokens 100: 12 tokens, not a crash at position 513."""
    engine = Engine(num_pages=32, page_size=16, budget=512, max_model_len=512)
    request = engine.add("a", 500, SamplingParams(max_tokens=100, ignore_eos=True))
    engine.finish_all()
    assert (request.finish_reason, len(request.output_ids)) == (FinishReason.LENGTH, 12)


def test_params_shared_by_many_requests_are_left_alone() -> None:
    engine = Engine(num_pages=32, page_size=16, budget=512, max_model_len=512)
    shared = SamplingParams(max_tokens=40, ignore_eos=True)
    copy = replace(shared)
    long, short = engine.add("long", 507, shared), engine.add("short", 10, shared)
    engine.finish_all()
    assert (len(long.output_ids), len(short.output_ids)) == (5, 40)
    assert shared == copy
    assert long.params is short.params is shared


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        (600, 1, r"600 tokens with max_tokens=1 needs 3 pages of 256 tokens, but .* has 2"),
        (500, 14, r"500 tokens with max_tokens=14 needs 3 pages of 256 tokens, but .* has 2"),
        (0, 1, r"no tokens: give at least 1"),
        (1_000, 1, r"1000 tokens, but max_model_len=1000 allows 999 .*: shorten it or raise"),
    ],
)
def test_a_request_that_can_never_be_served_fails_alone(
    prompt: int, max_tokens: int, message: str
) -> None:
    """2 pages of 256: 512 positions, which 500 + 13 tokens just use (the last needs no K/V)."""
    engine = Engine(num_pages=2, page_size=256, budget=512, max_model_len=1_000)
    before = engine.add("before", 500, SamplingParams(max_tokens=13, ignore_eos=True))
    with pytest.raises(RequestError, match=message):
        engine.add("bad", prompt, SamplingParams(max_tokens=max_tokens))
    after = engine.add("after", 10, SamplingParams(max_tokens=3, ignore_eos=True))
    assert engine.finish_all() == [before, after]
    assert (len(before.output_ids), len(after.output_ids)) == (13, 3)


def test_an_id_in_use_is_refused_and_a_finished_one_is_not() -> None:
    engine = Engine()
    engine.add("a", 3, SamplingParams(max_tokens=1))
    with pytest.raises(RequestError, match="request_id='a' is in use"):
        engine.add("a", 3)
    engine.finish_all()
    engine.add("a", 3)
