"""Steps launched before the ids of the one before are read: the same tokens, and no more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine import LLM, FinishReason, SamplingParams
from engine.resolve import resolve
from engine.shape import ModelShape
from tests.support.checkpoints import Checkpoints
from tests.support.engines import small_engine
from tests.support.greedy import greedy_reference
from tests.support.sampling import mixed_params, mixed_prompts

GREEDY = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
PROMPTS = [[(7 * i + 3 * n) % 97 for i in range(n)] for n in (1, 5, 8, 9, 13, 20)]
TIGHT: dict[str, Any] = {"page_size": 4, "num_pages": 14, "max_num_seqs": 4,
                         "max_num_batched_tokens": 7, "max_model_len": 64}  # fmt: skip


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_tokens_are_transformers_through_chunks_and_preemptions(
    checkpoints: Checkpoints, tp: int, prefix_cache: bool
) -> None:
    path = checkpoints()
    with small_engine(path, overlap=True, tp=tp, prefix_cache=prefix_cache, **TIGHT) as llm:
        for _ in range(2):
            outputs = llm.generate(PROMPTS, GREEDY)
            for prompt, output in zip(PROMPTS, outputs, strict=True):
                assert tuple(output.token_ids) == greedy_reference(path, tuple(prompt), 14)
        assert llm.counters()["preemptions"] > 0
        assert llm.effective["overlap"] is True


def test_ends_that_no_length_announces_leave_no_surplus_token(checkpoints: Checkpoints) -> None:
    """Stop ids end requests in the middle: the later step has run by then."""
    path = checkpoints()
    free = [greedy_reference(path, tuple(p), 14) for p in PROMPTS]
    stops = [tokens[3 + i] for i, tokens in enumerate(free)]
    params = [
        SamplingParams(temperature=0, max_tokens=14, ignore_eos=True, stop_token_ids=[stop])
        for stop in stops
    ]
    with small_engine(path, overlap=True) as llm:
        outputs = llm.generate(PROMPTS, params)
        (steps,) = llm.drain_steps()
        again = llm.generate(PROMPTS, GREEDY)  # slots and pages of the ended are whole again
    for output, tokens, stop in zip(outputs, free, stops, strict=True):
        assert output.token_ids == list(tokens[: tokens.index(stop) + 1])
        assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, stop)
        assert len(output.token_times_s) == len(output.token_ids)
    assert [tuple(o.token_ids) for o in again] == free
    generated = sum(len(o.token_ids) for o in outputs)
    surplus = int(steps["samples"].sum()) - generated
    assert 0 < surplus <= len(PROMPTS)  # computed, and dropped


def test_lengths_are_known_ahead_and_cost_no_step(checkpoints: Checkpoints) -> None:
    with small_engine(checkpoints(), overlap=True, max_model_len=32) as llm:
        outputs = llm.generate([[1] * 5, [2] * 30, [3] * 31], [GREEDY] * 3)
        (steps,) = llm.drain_steps()
    assert [len(o.token_ids) for o in outputs] == [14, 2, 1]
    assert all(o.finish_reason is FinishReason.LENGTH for o in outputs)
    assert int(steps["samples"].sum()) == 17


@pytest.mark.parametrize("tp", [1, 2])
def test_filters_penalties_and_logprobs_do_not_need_the_host(
    checkpoints: Checkpoints, tp: int
) -> None:
    """Whatever a row asks for is the same whether or not its last token is known to the host."""
    found = []
    for overlap in (False, True):
        with small_engine(checkpoints(), overlap=overlap, tp=tp) as llm:
            outputs = llm.generate(mixed_prompts(), mixed_params())
            found.append([(o.token_ids, o.logprobs, o.prompt_logprobs) for o in outputs])
    assert found[0] == found[1]


def test_times_of_steps_follow_each_other(checkpoints: Checkpoints) -> None:
    """A step's wall time begins where the collecting of the one before it ends."""
    with small_engine(checkpoints(), overlap=True) as llm:
        llm.generate(PROMPTS, GREEDY)
        (steps,) = llm.drain_steps()
        llm.generate(PROMPTS[:1], GREEDY)
        (later,) = llm.drain_steps()
    for rows in (steps, later):
        assert (rows["wall_end_ns"] > rows["wall_begin_ns"]).all()
        assert (rows["wall_begin_ns"][1:] >= rows["wall_end_ns"][:-1]).all()
        assert (rows["begin_ns"] <= rows["end_ns"]).all()


def test_on_a_cpu_it_must_be_asked_for(checkpoints: Checkpoints) -> None:
    path = checkpoints()
    shape = ModelShape.from_hf(path)

    def overlaps(path: Path, **options: Any) -> bool | None:
        from engine import EngineConfig

        config = EngineConfig(model=str(path), device="cpu", enforce_eager=True, **options)
        return resolve(config, shape).overlap

    assert overlaps(path) is False
    assert overlaps(path, overlap=True) is True


def test_streams_hear_each_token_once(checkpoints: Checkpoints) -> None:
    path = checkpoints()
    heard: dict[str, list[int]] = {}
    with small_engine(path, overlap=True) as llm:
        for update in llm.stream(PROMPTS, GREEDY):
            heard.setdefault(update.request_id, []).extend(update.token_ids)
    expected = [list(greedy_reference(path, tuple(p), 14)) for p in PROMPTS]
    assert sorted(heard.values()) == sorted(expected)


def test_an_engine_with_steps_in_flight_closes(checkpoints: Checkpoints) -> None:
    llm: LLM = small_engine(checkpoints(), overlap=True)
    stream = llm.stream(PROMPTS[0], GREEDY)
    next(iter(stream))
    llm.close()
