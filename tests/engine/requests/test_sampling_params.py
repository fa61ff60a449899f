"""SamplingParams: what is refused and how it is said; when a row is plain; what ends it."""

from __future__ import annotations

import math
import pickle
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from engine.errors import RequestError
from engine.requests.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": -0.1}, "temperature=-0.1: give a number in [0, 1e+30] (0 is greedy)"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"temperature": math.inf}, "temperature=inf"),
        ({"temperature": "1"}, "temperature='1'"),
        ({"temperature": True}, "temperature=True"),
        ({"top_k": 0}, "top_k=0: give an integer of at least 1, or None (all tokens)"),
        ({"top_k": 2.0}, "top_k=2.0"),
        ({"top_p": 0}, "top_p=0: give a number in (0, 1]"),
        ({"top_p": 1.01}, "top_p=1.01"),
        ({"top_p": None}, "top_p=None"),
        ({"min_p": -1}, "min_p=-1: give a number in [0, 1]"),
        ({"min_p": 1.5}, "min_p=1.5"),
        ({"repetition_penalty": 0}, "repetition_penalty=0: give a number in [1e-30, 1e+30]"),
        ({"presence_penalty": math.inf}, "presence_penalty=inf"),
        ({"frequency_penalty": 1e31}, "frequency_penalty=1e+31: give a number in [-1e+30, 1e+30]"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias: token id=-1"),
        ({"logit_bias": {1.5: 1.0}}, "logit_bias: token id=1.5"),
        ({"logit_bias": {7: math.inf}}, "logit_bias of token 7=inf"),
        ({"logit_bias": [(7, 1.0), (7, 2.0)]}, "name each token id once"),
        ({"logit_bias": [7]}, "logit_bias=[7]: give a mapping or pairs"),
        ({"logit_bias": 7}, "logit_bias=7: give a mapping or pairs"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"min_tokens": -1}, "min_tokens=-1"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens=4: must be at most max_tokens=3"),
        ({"stop_token_ids": [1, -5]}, "stop_token_ids=-5"),
        ({"stop_token_ids": 5}, "stop_token_ids=5: give a sequence"),
        ({"stop": ["a", ""]}, "stop=''"),
        ({"stop": 5}, "stop=5: give a sequence"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**63}, f"seed={2**63}"),
        ({"seed": 1.5}, "seed=1.5"),
        ({"logprobs": 65}, "logprobs=65: give an integer in [0, 64]"),
        ({"prompt_logprobs": -1}, "prompt_logprobs=-1"),
        ({"n": 0}, "n=0"),
    ],
)
def test_what_is_refused_is_named_with_its_limit(params: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**params)
    assert message in str(caught.value)


def test_numbers_of_any_kind_and_collections_are_kept_as_given() -> None:
    bias = {5: 1, 2: -0.5}
    half = np.float32(0.5)
    params = SamplingParams(
        temperature=half, top_p=Fraction(1, 2), logit_bias=bias, stop_token_ids={9}, stop="x"
    )
    bias[5] = 100
    assert params.logit_bias == ((5, 1), (2, -0.5))
    assert (params.stop_token_ids, params.stop) == ((9,), ("x",))
    assert hash(params) == hash(pickle.loads(pickle.dumps(params)))
    assert params == pickle.loads(pickle.dumps(params))


@pytest.mark.parametrize(
    ("params", "plain_from"),
    [
        ({}, 0),
        ({"temperature": 0}, 0),
        ({"seed": 3, "max_tokens": 5, "ignore_eos": True, "stop": "x", "n": 2}, 0),
        ({"prompt_logprobs": 3}, 0),  # the prompt's rows, not the sampled ones
        ({"top_k": 5}, math.inf),
        ({"top_p": 0.9}, math.inf),
        ({"min_p": 0.1}, math.inf),
        ({"temperature": 0, "top_k": 5, "top_p": 0.9, "min_p": 0.1}, 0),  # the argmax stays
        ({"temperature": 0, "repetition_penalty": 1.1}, math.inf),
        ({"presence_penalty": 0.1}, math.inf),
        ({"frequency_penalty": 0.1}, math.inf),
        ({"logit_bias": {1: 1.0}}, math.inf),
        ({"logprobs": 0}, math.inf),
        ({"min_tokens": 7}, 7),
        ({"min_tokens": 7, "logprobs": 0}, math.inf),
    ],
)
def test_from_when_on_a_row_is_plain(params: dict[str, Any], plain_from: float) -> None:
    assert SamplingParams(**params).plain_from == plain_from


def test_what_ends_a_request() -> None:
    assert SamplingParams().ends((2, 3)) == {2, 3}
    assert SamplingParams(stop_token_ids=[7, 2]).ends((2, 3)) == {2, 3, 7}
    assert SamplingParams(stop_token_ids=[7], ignore_eos=True).ends((2, 3)) == {7}


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            {"logit_bias": {4: 1.0, 5: 1.0}},
            "logit_bias: token id 5: this model's ids are in [0, 5)",
        ),
        ({"stop_token_ids": [99]}, "stop_token_ids: token id 99"),
        ({"stop_token_ids": [0, 1, 3, 4], "min_tokens": 1}, "each of the 5 tokens ends"),
    ],
)
def test_what_the_model_cannot_do(params: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**params).check_model(5, (2,))
    assert message in str(caught.value)


def test_what_the_model_can_do() -> None:
    ends = [0, 1, 3, 4]
    SamplingParams(top_k=10**6, logit_bias={4: 1.0}, stop_token_ids=ends).check_model(5, (2,))
    SamplingParams(stop_token_ids=ends, min_tokens=1, ignore_eos=True).check_model(5, (2,))
