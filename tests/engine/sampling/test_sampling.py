"""Requests that ask for more than a temperature, mixed in a batch, against transformers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from engine import LLM, FinishReason, RequestOutput, SamplingParams
from engine.sampling import step_sampler
from engine.sampling.penalties import PenaltyState
from tests.support.checkpoints import Checkpoints, reference_generate
from tests.support.engines import small_engine
from tests.support.greedy import greedy_reference
from tests.support.sampling import mixed_params, mixed_prompts, tokens_reference

PROMPTS, PARAMS = mixed_prompts(), mixed_params()


@pytest.fixture(scope="module")
def llm(checkpoints: Checkpoints) -> Iterator[LLM]:
    with small_engine(checkpoints()) as made:
        yield made


@pytest.fixture(scope="module")
def expected(checkpoints: Checkpoints) -> list[list[int]]:
    path = checkpoints()
    return [tokens_reference(path, *pair) for pair in zip(PROMPTS, PARAMS, strict=True)]


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    assert not any(output.error for output in outputs)
    return [output.token_ids for output in outputs]


# -- tokens ---------------------------------------------------------------------------------------


def test_a_mixed_batch_gives_the_tokens_of_float64(llm: LLM, expected: list[list[int]]) -> None:
    outputs = llm.generate(PROMPTS, PARAMS)
    assert tokens(outputs) == expected
    reasons = {output.finish_reason for output in outputs}
    assert reasons == {FinishReason.LENGTH, FinishReason.STOP}
    plain = [greedy_reference(Path(llm.config.model), tuple(p), 10) for p in PROMPTS]
    assert sum(tuple(e) == p for e, p in zip(expected, plain, strict=True)) <= 4


def test_each_request_alone_gives_the_same(llm: LLM, expected: list[list[int]]) -> None:
    alone = [llm.generate([p], s) for p, s in zip(PROMPTS, PARAMS, strict=True)]
    assert [tokens(outputs)[0] for outputs in alone] == expected


def test_the_order_of_the_batch_changes_nothing(llm: LLM, expected: list[list[int]]) -> None:
    assert tokens(llm.generate(PROMPTS[::-1], PARAMS[::-1])) == expected[::-1]


def test_slices_of_rows_change_nothing(
    llm: LLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_sampler, "SLICE_ROWS", 2)
    assert tokens(llm.generate(PROMPTS, PARAMS)) == expected


@pytest.mark.parametrize("options", [{"max_num_batched_tokens": 11, "max_num_seqs": 5},
                                     {"max_num_batched_tokens": 3, "max_num_seqs": 2}])  # fmt: skip
def test_chunks_of_prompts_change_nothing(
    checkpoints: Checkpoints, expected: list[list[int]], options: dict[str, int]
) -> None:
    with small_engine(checkpoints(), **options) as chunked:
        assert tokens(chunked.generate(PROMPTS, PARAMS)) == expected


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_preemption_changes_nothing(
    checkpoints: Checkpoints, expected: list[list[int]], prefix_cache: bool
) -> None:
    options: dict[str, Any] = {"num_pages": 11, "max_num_seqs": 8, "prefix_cache": prefix_cache}
    with small_engine(checkpoints(), **options) as small:
        outputs = small.generate(PROMPTS, PARAMS)
    assert tokens(outputs) == expected
    penalised = {i for i, params in enumerate(PARAMS) if params.penalised}
    assert penalised & {i for i, output in enumerate(outputs) if output.preemptions}


def test_greedy_penalties_are_those_of_transformers_generate(
    llm: LLM, checkpoints: Checkpoints
) -> None:
    for prompt in PROMPTS[:6]:
        for penalty in (1.2, 2.0):
            params = SamplingParams(
                temperature=0, max_tokens=12, min_tokens=12, repetition_penalty=penalty
            )
            theirs = reference_generate(
                checkpoints(),
                prompt,
                max_new_tokens=12,
                min_new_tokens=12,
                repetition_penalty=penalty,
            )
            assert tokens(llm.generate([prompt], params))[0] == theirs


def test_top_k_of_one_is_greedy_and_of_all_is_plain(llm: LLM) -> None:
    prompts = PROMPTS[:5]
    plain = [SamplingParams(temperature=0.9, seed=i, ignore_eos=True) for i in range(5)]
    greedy = SamplingParams(temperature=0, ignore_eos=True)

    def with_k(k: int) -> list[SamplingParams]:
        return [SamplingParams(temperature=0.9, seed=i, ignore_eos=True, top_k=k) for i in range(5)]

    assert tokens(llm.generate(prompts, with_k(1))) == tokens(llm.generate(prompts, greedy))
    assert tokens(llm.generate(prompts, with_k(10**6))) == tokens(llm.generate(prompts, plain))


# -- min_tokens -----------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_eos_comes_as_soon_as_it_may(llm: LLM, temperature: float) -> None:
    wanted: dict[str, Any] = {"temperature": temperature, "seed": 0, "logit_bias": {2: 60.0}}
    early, late, ignored = llm.generate(
        [[5, 6, 7]] * 3,
        [
            SamplingParams(**wanted),
            SamplingParams(**wanted, min_tokens=5),
            SamplingParams(**wanted, min_tokens=5, max_tokens=8, ignore_eos=True),
        ],
    )
    assert early.token_ids == [2] and early.finish_reason is FinishReason.STOP
    assert len(late.token_ids) == 6 and late.token_ids.index(2) == 5
    assert late.finish_reason is FinishReason.STOP
    assert ignored.token_ids == [2] * 8


def test_stop_tokens_are_masked_as_long(llm: LLM) -> None:
    params = SamplingParams(
        temperature=0, logit_bias={7: 60.0}, stop_token_ids=[7], min_tokens=3, max_tokens=4
    )
    found = llm.generate([[5, 6, 7]], params)[0].token_ids
    assert 7 not in found[:3] and found[3] == 7


# -- what the model tells -------------------------------------------------------------------------


def test_a_request_that_the_model_cannot_serve_fails_alone(llm: LLM) -> None:
    bad = [
        SamplingParams(logit_bias={97: 1.0}),
        SamplingParams(stop_token_ids=[96, 200]),
        SamplingParams(stop_token_ids=range(97), min_tokens=1),
    ]
    good = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, top_k=10**9)
    *refused, served = llm.generate([[1, 2, 3]] * 4, [*bad, good])
    assert [output.finish_reason for output in refused] == [FinishReason.ERROR] * 3
    assert "logit_bias: token id 97: this model's ids are in [0, 97)" in str(refused[0].error)
    assert "stop_token_ids: token id 200" in str(refused[1].error)
    assert "each of the 97 tokens" in str(refused[2].error)
    assert tuple(served.token_ids) == greedy_reference(Path(llm.config.model), (1, 2, 3), 5)


def test_compiled_code_gives_the_same(
    checkpoints: Checkpoints, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traced only: what inductor makes of a forward is tested elsewhere and takes a minute."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    with small_engine(checkpoints(), compile="model") as compiled:
        assert compiled.effective["mode"] == "compiled-model"
        assert tokens(compiled.generate(PROMPTS, PARAMS)) == expected


def test_plain_requests_keep_no_state(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory for penalties is taken at the first request with one."""
    made = mock.Mock(wraps=PenaltyState)
    monkeypatch.setattr("engine.sampling.step_sampler.PenaltyState", made)
    with small_engine(checkpoints()) as fresh:
        fresh.generate(PROMPTS[:2], SamplingParams(top_k=5, max_tokens=3))
        assert made.call_count == 0
        fresh.generate(PROMPTS[:2], SamplingParams(presence_penalty=0.1, max_tokens=3))
        assert made.call_count == 1
