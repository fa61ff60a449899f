"""n outputs of one prompt: seeds, shared pages, leaders that fail, and how they come back."""

from __future__ import annotations

from typing import Any

import pytest

from engine import LLM, FinishReason, SamplingParams
from engine.requests.request import Request
from engine.scheduling.blocks import BlockPool
from engine.scheduling.scheduler import Scheduler
from tests.support.checkpoints import Checkpoints
from tests.support.engines import small_engine
from tests.support.tokenizers import decode

PAGE = 8
PROMPT = [(7 * i) % 97 for i in range(3 * PAGE + 3)]


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 1.0, "seed": 4, "max_tokens": 12, "ignore_eos": True, **changes}
    )


def seed_of(seed: int, sample: int) -> int:
    """As the documentation says: the request's own, then steps of an odd constant."""
    return (seed + sample * 0xD1B54A32D192ED03) % 2**63


def test_each_sample_is_a_request_with_a_seed_of_its_own(speaking: LLM) -> None:
    one, two = speaking.generate([PROMPT, "the cat"], params(n=4))
    for prompt, output in ((PROMPT, one), ("the cat", two)):
        assert [s.sample for s in output.samples] == [0, 1, 2, 3]
        assert output.samples[0] is output and output.siblings == output.samples[1:]
        assert {s.request_id for s in output.samples} == {output.request_id}
        alone = [
            speaking.generate([prompt], params(seed=seed_of(4, i)))[0]  # type: ignore[list-item]
            for i in range(4)
        ]
        assert [s.token_ids for s in output.samples] == [o.token_ids for o in alone]
        assert len({tuple(o.token_ids) for o in alone}) == 4
        assert [s.text for s in output.samples] == [o.text for o in alone]
    assert two.siblings[2].text == decode(two.siblings[2].token_ids)
    assert one.siblings[0].siblings == ()


def test_n_of_1_is_what_it_was(speaking: LLM) -> None:
    plain, same = speaking.generate([PROMPT, PROMPT], [params(), params(n=1)])
    assert plain.token_ids == same.token_ids
    assert (same.sample, same.siblings, same.samples) == (0, (), (same,))


def test_samples_stream_each_on_its_own(speaking: LLM) -> None:
    whole = speaking.generate(["the cat"], params(n=3))[0]
    texts, outputs = ["", "", ""], {}
    for update in speaking.stream("the cat", params(n=3)):
        assert update.index == 0
        texts[update.sample] += update.text or ""
        if update.output is not None:
            outputs[update.sample] = update.output
    assert texts == [s.text for s in whole.samples]
    assert [outputs[i].token_ids for i in range(3)] == [s.token_ids for s in whole.samples]
    assert [outputs[i].sample for i in range(3)] == [0, 1, 2]


def test_derived_seeds_of_requests_and_samples_differ(checkpoints: Checkpoints) -> None:
    """Without a seed of its own a request's follows from its ordinal: no sample repeats another
    request's."""
    with small_engine(checkpoints()) as llm:
        outputs = llm.generate([[1, 2]] * 4, params(seed=None, n=4))
        again = llm.generate([[1, 2]] * 4, params(seed=None, n=4))
    drawn = {tuple(s.token_ids) for o in (*outputs, *again) for s in o.samples}
    assert len(drawn) == 32


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_the_prompt_is_computed_once(checkpoints: Checkpoints, prefix_cache: bool) -> None:
    """27 tokens: 24 in full pages, which the others find; without a prefix cache each computes."""
    options = {"prefix_cache": prefix_cache, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    with small_engine(checkpoints(), **options) as llm:
        output = llm.generate([PROMPT], params(n=4))[0]
        (steps,) = llm.drain_steps()
        assert [len(s.token_ids) for s in output.samples] == [12] * 4
        prompt_tokens = int(steps["tokens"].sum()) - 4 * 11
        cached = [s.cached_tokens for s in output.samples]
        if prefix_cache:
            assert (cached, prompt_tokens) == ([0, 24, 24, 24], 27 + 3 * 3)
            assert llm.counters()["cached_tokens"] == 72
            # The first chunk, the second, and then everybody.
            assert steps["batch"][:3].tolist() == [1, 1, 4]
        else:
            assert (cached, prompt_tokens) == ([0] * 4, 4 * 27)
    for sample in output.siblings:
        assert sample.queue_s is not None and sample.ttft_s is not None
        assert sample.arrival_s == output.arrival_s
        assert sample.queue_s > (output.ttft_s or 0) or not prefix_cache


def test_log_probabilities_of_the_prompt_stand_in_the_first_output(speaking: LLM) -> None:
    """It computes the whole prompt for them; the others still share its pages."""
    output = speaking.generate([PROMPT], params(n=3, prompt_logprobs=0, logprobs=0))[0]
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(PROMPT)
    assert [s.prompt_logprobs for s in output.siblings] == [None, None]
    assert [s.cached_tokens for s in output.samples] == [0, 24, 24]
    for sample in output.samples:
        assert sample.logprobs is not None
        assert [entry.token_id for entry in sample.logprobs] == sample.token_ids


@pytest.mark.parametrize("max_num_seqs", [1, 3])
def test_more_samples_than_places(checkpoints: Checkpoints, max_num_seqs: int) -> None:
    with small_engine(checkpoints()) as llm:
        expected = [s.token_ids for s in llm.generate([PROMPT], params(n=7))[0].samples]
    # 5 pages for one of 39 tokens: of three at once some are preempted, their leader included.
    options = {"max_num_seqs": max_num_seqs, "num_pages": 6, "max_num_batched_tokens": 9}
    with small_engine(checkpoints(), **options) as llm:
        outputs = llm.generate([PROMPT, [1]], params(n=7))
        assert [s.token_ids for s in outputs[0].samples] == expected
        assert all(len(s.token_ids) == 12 for s in outputs[1].samples)


def test_a_bad_prompt_fails_with_all_its_samples(speaking: LLM) -> None:
    bad, good = speaking.generate([[1] * 256, [1]], params(n=3))
    for sample in bad.samples:
        assert sample.finish_reason is FinishReason.ERROR and "256 tokens" in str(sample.error)
    assert [len(s.token_ids) for s in good.samples] == [12] * 3
    updates = list(speaking.stream([1] * 256, params(n=3)))
    assert [u.sample for u in updates] == [0, 1, 2]


# -- the scheduler: a leader in every state --------------------------------------------------------


def scheduler(prefix_cache: bool = True) -> Scheduler:
    return Scheduler(
        pool=BlockPool(64, 4, prefix_cache),
        max_num_seqs=4,
        max_num_batched_tokens=4,
        max_model_len=64,
        eos_token_ids=[],
    )


def add(scheduler: Scheduler, name: str, leader: str | None, prompt: int = 10) -> Request:
    request = Request(name, [9] * prompt, params(), 0, 0.0, leader_id=leader)
    scheduler.add(request)
    return request


def step(scheduler: Scheduler) -> list[str]:
    """The requests of one step."""
    schedule = scheduler.schedule()
    scheduler.check_invariants()
    scheduler.update(schedule, [5] * sum(seq.samples for seq in schedule.seqs), 0.0)
    scheduler.check_invariants()
    return [seq.request.request_id for seq in schedule.seqs]


def test_others_are_served_while_siblings_wait_and_then_come_first() -> None:
    s = scheduler()
    add(s, "a", None)
    add(s, "a.1", "a")
    add(s, "a.2", "a")
    add(s, "b", None, prompt=1)
    add(s, "c", None, prompt=20)
    add(s, "d", None, prompt=1)
    assert s.num_waiting == 6
    # Prompts of 10 in chunks of 4: the third leaves 2 tokens for b and the beginning of c.
    assert [step(s) for _ in range(3)] == [["a"], ["a"], ["a", "b", "c"]]
    assert step(s) == ["a", "b", "c"]  # c began before; the budget is spent
    s.abort("c")
    # 8 of the 10 are found: 2 tokens to compute for the first, all that the budget leaves; then
    # the second, and d, which arrived after them.
    assert step(s) == ["a", "b", "a.1"]
    assert step(s) == ["a", "b", "a.1", "a.2"]
    s.abort("b")
    assert step(s) == ["a", "a.1", "a.2", "d"]


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_a_leader_that_goes_leaves_its_siblings(steps: int) -> None:
    s = scheduler()
    add(s, "a", None)
    others = [add(s, f"a.{i}", "a") for i in (1, 2)]
    for _ in range(steps):
        step(s)
    s.abort("a")
    s.check_invariants()
    for _ in range(40):
        if s.has_work:
            step(s)
    assert [len(r.output_ids) for r in others] == [12, 12]


def test_a_sibling_that_goes_while_it_is_held() -> None:
    s = scheduler()
    add(s, "a", None)
    others = [add(s, f"a.{i}", "a") for i in (1, 2)]
    step(s)
    assert s.abort("a.1") is others[0]
    s.check_invariants()
    for _ in range(40):
        if s.has_work:
            step(s)
    assert [len(r.output_ids) for r in others] == [0, 12]


@pytest.mark.parametrize(
    ("prefix_cache", "prompt", "steps"),
    [
        (False, 10, [["a"], ["a"], ["a", "a.1"]]),
        (True, 10, [["a"], ["a"], ["a"]]),  # beside them: one that waits
        (True, 3, [["a", "a.1"]]),  # no full page before the token that each must compute
        (True, 4, [["a"], ["a", "a.1"]]),
    ],
)
def test_siblings_do_not_wait_for_what_they_cannot_share(
    prefix_cache: bool, prompt: int, steps: list[list[str]]
) -> None:
    s = scheduler(prefix_cache)
    add(s, "a", None, prompt)
    add(s, "a.1", "a", prompt)
    assert [step(s) for _ in steps] == steps


def test_a_leader_that_is_unknown_or_done_is_not_waited_for() -> None:
    s = scheduler()
    late = add(s, "x.1", "x")
    assert step(s) == ["x.1"]
    add(s, "a", None, prompt=6)
    while late.finish_reason is None:
        step(s)
    follower = add(s, "a.1", "a", prompt=6)
    step(s)
    assert follower.slot >= 0 and follower.num_computed >= 4
