"""LLM.stream against generate() and transformers' decode(), at tp=1 and over two processes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from engine import LLM, FinishReason, RequestError, RequestOutput, SamplingParams, StreamUpdate
from engine.client import Client
from engine.messages import FromRanks, Results
from tests.support.checkpoints import Checkpoints
from tests.support.engines import engine
from tests.support.greedy import greedy_reference
from tests.support.tokenizers import decode, text_checkpoint

SEEDED = SamplingParams(temperature=1.0, seed=5, max_tokens=40, ignore_eos=True)
ENDLESS = SamplingParams(temperature=1.0, max_tokens=200, ignore_eos=True)
PROMPTS = ["the cat sat", "öäü €€ 日本語", "a"]


@pytest.fixture(scope="module", params=[1, 2])
def llm(checkpoints: Checkpoints, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with engine(text_checkpoint(checkpoints), tp=request.param, num_pages=104) as llm:
        yield llm


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


def assert_idle(llm: LLM) -> None:
    """Aborts are on their way: a while later no step is run any more."""
    deadline = time.monotonic() + 10
    while True:
        before = llm.counters()["scheduled_steps"]
        time.sleep(0.05)
        if llm.counters()["scheduled_steps"] == before:
            return
        assert time.monotonic() < deadline, "a request that nobody waits for runs on"


def test_a_stream_is_generate_in_pieces(llm: LLM) -> None:
    expected = llm.generate(PROMPTS, SEEDED)
    assert list(map(what, outputs(llm.stream(PROMPTS, SEEDED)))) == list(map(what, expected))
    for output in expected:
        assert output.text == decode(output.token_ids)
        assert "\N{REPLACEMENT CHARACTER}" in output.text  # bytes that are no characters: the worst


def test_tokens_of_ids_are_transformers_and_have_no_text(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [[5, 6, 7], list(range(20, 40))]
    for prompt, output in zip(prompts, outputs(llm.stream(prompts, greedy)), strict=True):
        path = Path(llm.config.model)
        assert tuple(output.token_ids) == greedy_reference(path, tuple(prompt), 12)
        assert output.text is None


def test_requests_come_interleaved_and_a_step_late_at_most(llm: LLM) -> None:
    order = [update.index for update in llm.stream([[1, 2], [3, 4]], SEEDED)]
    assert order[:6] == [0, 1, 0, 1, 0, 1]
    assert len(order) == 80


def test_one_prompt_needs_no_list(llm: LLM) -> None:
    for prompt in (PROMPTS[0], [5, 6, 7]):
        (alone,) = outputs(llm.stream(prompt, SEEDED))
        (listed,) = outputs(llm.stream([prompt], [SEEDED]))  # type: ignore[list-item]
        assert what(alone) == what(listed)
    assert outputs(llm.stream([], SEEDED)) == []


def test_leaving_early_ends_what_remains(llm: LLM) -> None:
    expected = what(llm.generate(PROMPTS[:1], SEEDED)[0])
    for update in llm.stream(PROMPTS, ENDLESS):
        if len(update.token_ids) and update.index == 2:
            break
    with llm.stream(PROMPTS, ENDLESS) as stream:
        next(stream)
    assert list(stream) == []
    stream = llm.stream(PROMPTS, ENDLESS, request_ids=["x", "y", "z"])
    next(stream)
    stream.close()
    stream.close()
    with pytest.raises(ZeroDivisionError):
        for _ in llm.stream(PROMPTS, ENDLESS, request_ids=["x", "y", "z"]):  # free again
            raise ZeroDivisionError
    llm.stream(PROMPTS, ENDLESS)  # nobody looks at it
    assert_idle(llm)
    # 4 of 208 tokens need all 104 pages: none of those requests has kept one.
    for output in llm.generate([[n] * 8 for n in range(4)], ENDLESS):
        assert len(output.token_ids) == 200 and output.preemptions == 0
    assert what(llm.generate(PROMPTS[:1], SEEDED)[0]) == expected


def test_streams_and_calls_of_one_thread_go_on_side_by_side(llm: LLM) -> None:
    expected = [what(o) for o in llm.generate(PROMPTS, SEEDED)]
    first, second = llm.stream(PROMPTS[0], SEEDED), llm.stream(PROMPTS[1], SEEDED)
    updates: dict[str, list[StreamUpdate]] = {"0": [], "1": []}
    for _ in range(10):
        updates["0"].append(next(first))
        updates["1"].append(next(second))
    assert what(llm.generate([PROMPTS[2]], SEEDED)[0]) == expected[2]
    updates["1"] += second
    updates["0"] += first
    last = [updates[name][-1].output for name in ("0", "1")]
    assert [what(output) for output in last if output is not None] == expected[:2]


def test_threads_stream_together(llm: LLM) -> None:
    expected = [what(o) for o in llm.generate(PROMPTS, SEEDED)]
    before = llm.counters()["scheduled_steps"]
    with ThreadPoolExecutor(3) as threads:
        found = threads.map(lambda prompt: outputs(llm.stream(prompt, SEEDED))[0], PROMPTS * 2)
        assert [what(output) for output in found] == expected * 2
    # 6 requests of 40 steps, 3 at a time: one after the other they would take 240.
    assert llm.counters()["scheduled_steps"] - before < 200


def test_a_bad_request_fails_alone(llm: LLM) -> None:
    prompts: list[Any] = [PROMPTS[0], [1] * 256, [], [0.5], PROMPTS[2]]
    first, long, empty, fraction, last = outputs(llm.stream(prompts, SEEDED))
    assert [what(first), what(last)] == [what(o) for o in llm.generate(PROMPTS[::2], SEEDED)]
    assert "256 tokens" in str(long.error) and "max_model_len=256" in str(long.error)
    assert "no tokens" in str(empty.error) and "float" in str(fraction.error)
    for output in (long, empty, fraction):
        assert (output.finish_reason, output.token_ids) == (FinishReason.ERROR, [])
        assert (output.ttft_s, output.e2e_s, output.queue_s) == (None, None, None)
    with pytest.raises(RequestError, match="2 params for 1 prompts"):
        llm.stream(PROMPTS[0], [SEEDED, SEEDED])


def test_times_are_those_of_the_tokens(llm: LLM) -> None:
    arrived = time.perf_counter()
    prompt = list(range(20, 31))
    seen = [time.perf_counter() for _ in llm.stream(prompt, SEEDED)]
    (output,) = outputs(llm.stream(prompt, SEEDED))
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
    plain = Client.deliver

    def heard(client: Client, message: FromRanks) -> None:
        messages.append(message)
        plain(client, message)

    monkeypatch.setattr(Client, "deliver", heard)
    with engine(text_checkpoint(checkpoints)) as llm:
        llm.generate(PROMPTS, SEEDED)
        results = [m for m in messages if isinstance(m, Results)]
        assert len(results) == 1 and not results[0].tokens  # all three end in one step
        messages.clear()
        list(llm.stream(PROMPTS, SEEDED))
        assert sum(len(m.tokens) for m in messages if isinstance(m, Results)) == 3 * 39
