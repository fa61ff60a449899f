"""Intake: what callers give is checked before a request is made of it."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from engine import LLM, FinishReason, RequestError, SamplingParams
from engine.frontend.intake import Intake
from engine.requests.tokenizer import Tokenizer
from tests.support.checkpoints import Checkpoints
from tests.support.tokenizers import hf_tokenizer, text_checkpoint

SHORT = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
MIDDLE = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


def test_a_text_that_is_no_text_fails_alone(checkpoints: Checkpoints) -> None:
    intake = Intake(Tokenizer(text_checkpoint(checkpoints)), seed=0)
    good, low, high = intake.calls(["the 🙂", "ok\ud800", "\udc00"], SHORT)
    assert good.requests[0].prompt_ids == hf_tokenizer().encode("the 🙂") and not good.finished
    assert r"character 2, '\ud800', is one half of a surrogate pair" in str(low.requests[0].error)
    assert r"character 0, '\udc00'" in str(high.requests[0].error)


def test_a_served_text_that_is_no_text_fails_alone(speaking: LLM) -> None:
    bad, good = speaking.generate(["ok\ud800", "the cat"], SHORT)
    assert "surrogate" in str(bad.error) and bad.token_ids == []
    assert good.token_ids == speaking.generate(["the cat"], SHORT)[0].token_ids


@pytest.mark.parametrize(
    "arrival", [float("nan"), float("inf"), float("-inf"), -0.5, 1e300, "1", None, np.nan]
)
def test_an_arrival_that_never_comes_is_refused(speaking: LLM, arrival: Any) -> None:
    with pytest.raises(RequestError, match=r"arrivals_s: ") as caught:
        speaking.generate([[1], [2]], SHORT, [0.0, arrival])
    assert repr(arrival) in str(caught.value)


def test_arrivals_are_numbers_of_any_kind(speaking: LLM) -> None:
    arrivals: list[Any] = [0, 0.01, np.float32(0.01), np.int64(0), Fraction(1, 100)]
    outputs = speaking.generate([[1]] * 5, SHORT, arrivals)
    begin = outputs[0].arrival_s
    assert [o.arrival_s - begin for o in outputs] == pytest.approx([0, 0.01, 0.01, 0, 0.01])
    assert all(len(o.token_ids) == 4 for o in outputs)


def test_generate_wants_a_list_of_prompts(speaking: LLM) -> None:
    for one in ([1, 2, 3], (1,), np.array([1, 2])):
        with pytest.raises(RequestError, match="one prompt of token ids: give a list of prompts"):
            speaking.generate(one)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="one text: give a list of prompts"):
        speaking.generate("the cat")
    assert speaking.generate([]) == []
    import torch

    expected = [o.token_ids for o in speaking.generate([[1], [2]], SHORT)]
    for several in (np.array([[1], [2]]), torch.tensor([[1], [2]])):
        found: list[Any] = speaking.generate(several, SHORT)  # type: ignore[arg-type]
        assert [o.token_ids for o in found] == expected


def test_a_text_is_no_list_of_ids(speaking: LLM) -> None:
    with pytest.raises(RequestError, match="request_ids='ab' is one text: give a list"):
        speaking.generate([[1], [2]], SHORT, request_ids="ab")
    with pytest.raises(RequestError, match="request_ids='x' is one text"):
        speaking.stream([1], SHORT, request_ids="x")


def test_requests_without_an_id_have_names_that_nobody_can_give(unhurried: LLM) -> None:
    """The ordinals of the next nameless requests are somebody's ids."""
    (name,) = unhurried.stream([1], SHORT).request_ids
    assert name.startswith("#")
    numbers = [str(int(name[1:]) + n) for n in (4, 5, 6)]  # 1, 2 and 3 are these requests' own
    with unhurried.stream([[1]] * 3, LONG, request_ids=numbers) as theirs:
        next(theirs)
        outputs = unhurried.generate([[1], [2]], SHORT)
        assert [o.error for o in outputs] == [None, None]
        with unhurried.stream([3], MIDDLE) as mine:
            names = [o.request_id for o in outputs] + list(mine.request_ids)
            assert names == [f"#{number}" for number in numbers]
            for number in numbers:
                unhurried.abort(number)  # theirs, and not mine
            last = [update.output for update in mine][-1]
        assert last is not None and len(last.token_ids) == 30
        ends = [update.output for update in theirs if update.output is not None]
        assert [o.finish_reason for o in ends] == [FinishReason.ABORT] * 3
    taken, free = unhurried.generate([[1], [2]], SHORT, request_ids=["#7", "#x"])
    assert "request_id='#7' is what the engine calls requests without an id" in str(taken.error)
    assert free.error is None
