"""Sampling on two ranks: the tokens of one rank, and the collectives of what is asked for."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from engine import LLM, Kind, SamplingParams, Site
from engine.comm import Collective, CollectiveObserver, ObserverContext
from tests.support.checkpoints import Checkpoints
from tests.support.engines import small_engine
from tests.support.sampling import mixed_params, mixed_prompts, tokens_reference

PROMPTS, PARAMS = mixed_prompts(), mixed_params()


class Recorder(CollectiveObserver):
    """Keeps what follows the body of each step."""

    def __init__(self, context: ObserverContext) -> None:
        self.heard: dict[int, list[tuple[Kind, Site, int]]] = {}

    def before(self, collective: Collective) -> None:
        of_step = self.heard.setdefault(collective.step, [])
        if collective.kind is not Kind.ALL_REDUCE:
            of_step.append((collective.kind, collective.site, collective.bytes))

    def result(self) -> list[list[tuple[Kind, Site, int]]]:
        return list(self.heard.values())


@pytest.fixture(scope="module")
def two_ranks(checkpoints: Checkpoints) -> Iterator[LLM]:
    path = checkpoints(max_position=1024)
    with small_engine(path, tp=2, max_num_seqs=8, num_pages=90) as llm:
        yield llm


def test_a_mixed_batch_gives_the_tokens_of_float64(
    checkpoints: Checkpoints, two_ranks: LLM
) -> None:
    path = checkpoints(max_position=1024)
    with small_engine(path) as alone:
        wanted = alone.generate(PROMPTS, PARAMS)
    for output, other in zip(two_ranks.generate(PROMPTS, PARAMS), wanted, strict=True):
        assert output.token_ids == other.token_ids
        for name in ("logprobs", "prompt_logprobs"):
            assert_near(getattr(output, name), getattr(other, name))
    for i in (4, 6, 9, 12):
        assert wanted[i].token_ids == tokens_reference(path, PROMPTS[i], PARAMS[i])


def assert_near(found: Any, other: Any) -> None:
    assert (found is None) == (other is None)
    for own, its in zip(found or (), other or (), strict=True):
        if own is None:
            assert its is None
            continue
        assert (own.token_id, own.rank) == (its.token_id, its.rank)
        assert own.logprob == pytest.approx(its.logprob, abs=1e-4)
        assert [t for t, _ in own.top] == [t for t, _ in its.top]
        assert [v for _, v in own.top] == pytest.approx([v for _, v in its.top], abs=1e-4)


def heard(llm: LLM, prompt: list[int], **params: Any) -> list[list[tuple[Kind, Site, int]]]:
    llm.attach([Recorder])
    llm.generate([prompt], SamplingParams(max_tokens=3, ignore_eos=True, **params))
    ((first,), (second,)) = llm.detach()
    assert first == second
    return first


WIDE = 98 * 4  # bytes of a row of float32 logits: 97 are padded to 98 over two ranks
SAMPLED = [(Kind.GATHER, Site.LM_HEAD, WIDE), (Kind.BROADCAST, Site.TOKEN_IDS, 8)]


def test_a_request_that_asks_for_more_has_the_collectives_of_one_that_does_not(
    two_ranks: LLM,
) -> None:
    asked = {"top_k": 5, "top_p": 0.9, "presence_penalty": 0.5, "logprobs": 3, "min_tokens": 2}
    assert heard(two_ranks, [5, 6, 7], **asked) == [SAMPLED] * 3


def test_rows_of_prompts_are_gathered_apart_in_slices(two_ranks: LLM) -> None:
    rng = random.Random(5)
    prompt = [rng.randrange(3, 97) for _ in range(600)]
    slices = [(Kind.GATHER, Site.LM_HEAD, rows * WIDE) for rows in (256, 256, 599 - 512)]
    assert heard(two_ranks, prompt, prompt_logprobs=0) == [slices + SAMPLED, SAMPLED, SAMPLED]
