"""LLM.stream against generate() and transformers' decode(), at tp=1 and over two processes."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from engine import LLM, FinishReason, RequestError, RequestOutput, SamplingParams, StreamUpdate
from engine.frontend.client import Client
from engine.ranks.messages import FromRanks, Results
from tests.support.checkpoints import Checkpoints
from tests.support.engines import assert_idle, small_engine
from tests.support.greedy import greedy_reference
from tests.support.tokenizers import decode, text_checkpoint

SEEDED = SamplingParams(temperature=1.0, seed=5, max_tokens=40, ignore_eos=True)
ENDLESS = SamplingParams(temperature=1.0, max_tokens=200, ignore_eos=True)
PROMPTS = ["the cat sat", "öäü €€ 日本語", "a"]


def followed(stream: Any) -> dict[tuple[int, int], list[StreamUpdate]]:
    """The updates of each (prompt, sample), checked for what holds of any."""
    seen: dict[tuple[int, int], list[StreamUpdate]] = {}
    for update in stream:
        of_sample = seen.setdefault((update.index, update.sample), [])
        assert not of_sample or of_sample[-1].output is None, "an update after the last"
        assert update.request_id == stream.request_ids[update.index]
        of_sample.append(update)
    for of_sample in seen.values():
        output = of_sample[-1].output
        assert output is not None
        assert [t for u in of_sample for t in u.token_ids] == output.token_ids
        assert all(len(u.token_ids) == 1 for u in of_sample[:-1])
        if output.text is None:
            assert {u.text for u in of_sample} == {None}
        else:
            assert "".join(u.text or "" for u in of_sample) == output.text
    return seen


def outputs(stream: Any) -> list[RequestOutput]:
    last = [updates[-1].output for _, updates in sorted(followed(stream).items())]
    return [output for output in last if output is not None]


def what(output: RequestOutput) -> tuple[Any, ...]:
    return (output.token_ids, output.text, output.finish_reason, output.stop_reason)


def test_a_stream_is_generate_in_pieces(speaking: LLM) -> None:
    expected = speaking.generate(PROMPTS, SEEDED)
    assert list(map(what, outputs(speaking.stream(PROMPTS, SEEDED)))) == list(map(what, expected))
    for output in expected:
        assert output.text == decode(output.token_ids)
        assert "\N{REPLACEMENT CHARACTER}" in output.text  # bytes that are no characters: the worst


def test_tokens_of_ids_are_transformers_and_have_no_text(speaking: LLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [[5, 6, 7], list(range(20, 40))]
    for prompt, output in zip(prompts, outputs(speaking.stream(prompts, greedy)), strict=True):
        path = Path(speaking.config.model)
        assert tuple(output.token_ids) == greedy_reference(path, tuple(prompt), 12)
        assert output.text is None


def test_requests_come_interleaved_and_a_step_late_at_most(speaking: LLM) -> None:
    order = [update.index for update in speaking.stream([[1, 2], [3, 4]], SEEDED)]
    assert order[:6] == [0, 1, 0, 1, 0, 1]
    assert len(order) == 80


def test_one_prompt_needs_no_list(speaking: LLM) -> None:
    for prompt in (PROMPTS[0], [5, 6, 7]):
        (alone,) = outputs(speaking.stream(prompt, SEEDED))
        (listed,) = outputs(speaking.stream([prompt], [SEEDED]))  # type: ignore[list-item]
        assert what(alone) == what(listed)
    assert outputs(speaking.stream([], SEEDED)) == []


def test_leaving_early_ends_what_remains(speaking: LLM) -> None:
    expected = what(speaking.generate(PROMPTS[:1], SEEDED)[0])
    for update in speaking.stream(PROMPTS, ENDLESS):
        if len(update.token_ids) and update.index == 2:
            break
    with speaking.stream(PROMPTS, ENDLESS) as stream:
        next(stream)
    assert list(stream) == []
    stream = speaking.stream(PROMPTS, ENDLESS, request_ids=["x", "y", "z"])
    next(stream)
    stream.close()
    stream.close()
    with pytest.raises(ZeroDivisionError):
        for _ in speaking.stream(PROMPTS, ENDLESS, request_ids=["x", "y", "z"]):  # free again
            raise ZeroDivisionError
    speaking.stream(PROMPTS, ENDLESS)  # nobody looks at it
    assert_idle(speaking)
    # 4 of 208 tokens need all 104 pages: none of those requests has kept one.
    for output in speaking.generate([[n] * 8 for n in range(4)], ENDLESS):
        assert len(output.token_ids) == 200 and output.preemptions == 0
    assert what(speaking.generate(PROMPTS[:1], SEEDED)[0]) == expected


def test_streams_and_calls_of_one_thread_go_on_side_by_side(speaking: LLM) -> None:
    expected = [what(o) for o in speaking.generate(PROMPTS, SEEDED)]
    first, second = speaking.stream(PROMPTS[0], SEEDED), speaking.stream(PROMPTS[1], SEEDED)
    updates: dict[str, list[StreamUpdate]] = {"0": [], "1": []}
    for _ in range(10):
        updates["0"].append(next(first))
        updates["1"].append(next(second))
    assert what(speaking.generate([PROMPTS[2]], SEEDED)[0]) == expected[2]
    updates["1"] += second
    updates["0"] += first
    last = [updates[name][-1].output for name in ("0", "1")]
    assert [what(output) for output in last if output is not None] == expected[:2]


def test_threads_stream_together(speaking: LLM) -> None:
    expected = [what(o) for o in speaking.generate(PROMPTS, SEEDED)]
    before = speaking.counters()["scheduled_steps"]
    with ThreadPoolExecutor(3) as threads:
        found = threads.map(lambda prompt: outputs(speaking.stream(prompt, SEEDED))[0], PROMPTS * 2)
        assert [what(output) for output in found] == expected * 2
    # 6 requests of 40 steps, 3 at a time: one after the other they would take 240.
    assert speaking.counters()["scheduled_steps"] - before < 200


def test_a_bad_request_fails_alone(speaking: LLM) -> None:
    prompts: list[Any] = [PROMPTS[0], [1] * 256, [], [0.5], PROMPTS[2]]
    first, long, empty, fraction, last = outputs(speaking.stream(prompts, SEEDED))
    assert [what(first), what(last)] == [what(o) for o in speaking.generate(PROMPTS[::2], SEEDED)]
    assert "256 tokens" in str(long.error) and "max_model_len=256" in str(long.error)
    assert "no tokens" in str(empty.error) and "float" in str(fraction.error)
    for output in (long, empty, fraction):
        assert (output.finish_reason, output.token_ids) == (FinishReason.ERROR, [])
        assert (output.ttft_s, output.e2e_s, output.queue_s) == (None, None, None)
    with pytest.raises(RequestError, match="2 params for 1 prompts"):
        speaking.stream(PROMPTS[0], [SEEDED, SEEDED])


def test_times_are_those_of_the_tokens(speaking: LLM) -> None:
    arrived = time.perf_counter()
    prompt = list(range(20, 31))
    seen = [time.perf_counter() for _ in speaking.stream(prompt, SEEDED)]
    (output,) = outputs(speaking.stream(prompt, SEEDED))
    assert output.queue_s is not None and output.ttft_s is not None and output.e2e_s is not None
    times = output.token_times_s
    assert len(times) == 40 == len(seen) and list(times) == sorted(times)
    assert output.arrival_s > arrived
    assert 0 <= output.queue_s <= output.ttft_s <= output.e2e_s
    assert output.arrival_s + output.e2e_s == pytest.approx(times[-1])
    assert output.tpot_s == pytest.approx((times[-1] - times[0]) / 39)
    assert output.cached_tokens == 8  # the first page of 11 tokens


def test_generate_hears_of_no_single_token(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[FromRanks] = []
    plain = Client._deliver

    def heard(client: Client, message: FromRanks) -> None:
        messages.append(message)
        plain(client, message)

    monkeypatch.setattr(Client, "_deliver", heard)
    with small_engine(text_checkpoint(checkpoints)) as llm:
        llm.generate(PROMPTS, SEEDED)
        results = [m for m in messages if isinstance(m, Results)]
        assert len(results) == 1 and not results[0].tokens  # all three end in one step
        messages.clear()
        list(llm.stream(PROMPTS, SEEDED))
        assert sum(len(m.tokens) for m in messages if isinstance(m, Results)) == 3 * 39
