"""LLM.abort while generate() and stream() run, at tp=1 and over two processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from engine import LLM, FinishReason, RequestOutput, SamplingParams
from tests.support.engines import assert_idle
from tests.support.tokenizers import decode

LONG = SamplingParams(temperature=1.0, seed=1, max_tokens=100, ignore_eos=True)
SHORT = SamplingParams(temperature=1.0, seed=1, max_tokens=10, ignore_eos=True)


def meanwhile(llm: LLM, act: Callable[[], None], *args: Any, **kwargs: Any) -> list[RequestOutput]:
    """generate(), and `act` in another thread once its requests run."""
    before = llm.counters()["scheduled_steps"]

    def wait_and_act() -> None:
        while llm.counters()["scheduled_steps"] < before + 3:
            time.sleep(0.001)
        act()

    thread = threading.Thread(target=wait_and_act)
    thread.start()
    try:
        return llm.generate(*args, **kwargs)
    finally:
        thread.join()


def assert_beginning(output: RequestOutput, whole: RequestOutput) -> None:
    assert output.finish_reason is FinishReason.ABORT
    tokens = output.token_ids
    assert 0 < len(tokens) < len(whole.token_ids) and tokens == whole.token_ids[: len(tokens)]
    assert len(output.token_times_s) == len(tokens)
    assert output.stop_reason is None and output.error is None


def test_one_of_several_ends_with_what_it_had(unhurried: LLM) -> None:
    prompts: list[Any] = ["the cat", [7, 8, 9], "an end"]
    whole = unhurried.generate(prompts, LONG)
    names = ["x", "y", "z"]
    x, y, z = meanwhile(unhurried, lambda: unhurried.abort("y"), prompts, LONG, request_ids=names)
    assert [o.request_id for o in (x, y, z)] == names
    assert [x.token_ids, z.token_ids] == [whole[0].token_ids, whole[2].token_ids]
    assert_beginning(y, whole[1])
    x, y, z = meanwhile(unhurried, lambda: unhurried.abort("x"), prompts, LONG, request_ids=names)
    assert_beginning(x, whole[0])
    assert x.text == decode(x.token_ids)
    assert [y.token_ids, z.token_ids] == [o.token_ids for o in whole[1:]]


def test_all_samples_of_a_request_end(unhurried: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=100, ignore_eos=True, n=3)
    whole = unhurried.generate([[5, 6]], params)[0]
    output = meanwhile(
        unhurried, lambda: unhurried.abort("x"), [[5, 6]], params, request_ids=["x"]
    )[0]
    for sample, complete in zip(output.samples, whole.samples, strict=True):
        assert_beginning(sample, complete)


def test_a_request_that_waits_or_has_not_arrived_ends_at_once(unhurried: LLM) -> None:
    prompts = [[n] for n in range(6)]  # four run, the fifth waits, the sixth comes in an hour
    arrivals = [0.0] * 5 + [3600.0]
    names = [f"r{n}" for n in range(6)]

    def act() -> None:
        for name in ("r5", "r4", "r4", "nobody"):
            unhurried.abort(name)

    outputs = meanwhile(unhurried, act, prompts, LONG, arrivals, request_ids=names)
    assert [len(o.token_ids) for o in outputs] == [100] * 4 + [0, 0]
    for output in outputs[4:]:
        assert output.finish_reason is FinishReason.ABORT
        times = (output.queue_s, output.ttft_s, output.tpot_s, output.e2e_s)
        assert times == (None, None, None, None)


def test_a_stream_ends_with_what_it_had(unhurried: LLM) -> None:
    whole = unhurried.generate(["the cat"], LONG)[0]
    stream = unhurried.stream(["the cat", "an end"], LONG)
    texts, last = {0: "", 1: ""}, {}
    for update in stream:
        texts[update.index] += update.text or ""
        last[update.index] = update.output
        if update.index == 0 and update.output is None:
            unhurried.abort(stream.request_ids[0])
    output = last[0]
    assert output is not None and last[1] is not None
    assert_beginning(output, whole)
    assert texts[0] == output.text == decode(output.token_ids)
    assert last[1].finish_reason is FinishReason.LENGTH and texts[1] == last[1].text


def test_text_that_was_held_back_comes_with_the_abort(unhurried: LLM) -> None:
    free = unhurried.generate(["the cat"], LONG)[0]
    assert free.text is not None
    # A stop string that begins like the output and goes on otherwise: all of it is held back.
    stop = free.text[:40] + "never"
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=100, ignore_eos=True, stop=stop)
    stream = unhurried.stream("the cat", params)
    pieces = []
    for update in stream:
        pieces.append(update.text)
        if len(pieces) == 5:
            unhurried.abort(stream.request_ids[0])
    assert update.output is not None and len(update.output.token_ids) < 100
    assert set(pieces[:-1]) == {""} and pieces[-1] == decode(update.output.token_ids)


def test_unknown_and_finished_ids_are_ignored(speaking: LLM) -> None:
    speaking.generate([[1]], SHORT, request_ids=["x"])
    for name in ("x", "nobody", "#0"):
        speaking.abort(name)
    assert len(speaking.generate([[1]], SHORT, request_ids=["x"])[0].token_ids) == 10


def test_an_id_in_use_is_refused_alone(unhurried: LLM) -> None:
    first, second, other = unhurried.generate([[1], [1], [2]], SHORT, request_ids=["x", "x", "y"])
    assert [len(first.token_ids), len(other.token_ids)] == [10, 10]
    assert "request_id='x' is in use" in str(second.error)
    stream = unhurried.stream([1], LONG, request_ids=["x"])
    assert "in use" in str(unhurried.generate([[1]], SHORT, request_ids=["x"])[0].error)
    stream.close()
    assert len(unhurried.generate([[1]], SHORT, request_ids=["x"])[0].token_ids) == 10


def test_ids_are_texts_one_each(speaking: LLM) -> None:
    for ids, message in ((["a"], "1 request_ids for 2 prompts"), ([1, 2], "1 is a int")):
        with pytest.raises(ValueError, match=message):
            speaking.generate([[1], [2]], SHORT, request_ids=ids)  # type: ignore[arg-type]


def test_many_aborts_from_many_threads(speaking: LLM) -> None:
    """Every request ends once, aborted or whole; then nothing is left."""
    names = [f"r{n}" for n in range(40)]
    whole = {n: speaking.generate([[n]], SHORT)[0].token_ids for n in range(0, 40, 8)}

    def abort(offset: int) -> None:
        for name in names[offset::4]:
            speaking.abort(name)
            time.sleep(0.002)

    threads = [threading.Thread(target=abort, args=(n,)) for n in (1, 2, 3)]
    for thread in threads:
        thread.start()
    outputs = speaking.generate([[n] for n in range(40)], SHORT, request_ids=names)
    for thread in threads:
        thread.join()
    assert [o.request_id for o in outputs] == names
    for n, output in enumerate(outputs):
        assert output.finish_reason in (FinishReason.ABORT, FinishReason.LENGTH)
        if n % 4 == 0:
            assert output.finish_reason is FinishReason.LENGTH
        assert output.token_ids == whole.get(n, output.token_ids)
    assert_idle(speaking)
