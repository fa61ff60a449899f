"""How requests end: EOS, stop ids, stop strings, min_tokens, lengths."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import pytest

from engine import LLM, FinishReason, RequestOutput, SamplingParams
from engine.requests.finish import finish_reason
from engine.requests.request import Request
from engine.requests.text import StopText
from tests.support.checkpoints import Checkpoints
from tests.support.engines import small_engine
from tests.support.tokenizers import EOS, decode

PROMPTS = ["the cat sat", "öäü €€", "an end of"]


def ends(params: SamplingParams, tokens: list[int], max_model_len: int = 100) -> tuple[Any, ...]:
    """(tokens until the end, reason, stop_reason, text) of a request that samples `tokens`; a
    token's text is its letter of the alphabet."""
    request = Request("a", [50], params, seed=0, arrival_s=0.0)
    if params.stop:
        request.watched = StopText(lambda ids: "".join(chr(97 + i) for i in ids), params.stop)
    for token in tokens:
        request.output_ids.append(token)
        reason = finish_reason(request, [EOS], max_model_len)
        if reason is not None:
            text = request.watched.text if request.watched else None
            return len(request.output_ids), reason.value, request.stop_reason, text
    return len(tokens), None, None, None


@pytest.mark.parametrize(
    ("params", "tokens", "expected"),
    [
        ({}, [0, EOS, 1], (2, "stop", None, None)),
        ({"ignore_eos": True}, [0, EOS, 1], (3, None, None, None)),
        ({"stop_token_ids": [5, 7]}, [0, 7, 1], (2, "stop", 7, None)),
        ({"stop_token_ids": [EOS]}, [EOS], (1, "stop", None, None)),
        ({"stop_token_ids": [EOS], "ignore_eos": True}, [EOS], (1, "stop", EOS, None)),
        ({"max_tokens": 2}, [0, 1, 3], (2, "length", None, None)),
        ({"max_tokens": 2}, [0, EOS, 3], (2, "stop", None, None)),
        ({"max_tokens": 2, "stop_token_ids": [1]}, [0, 1], (2, "stop", 1, None)),
        ({"stop": "ab"}, [3, 0, 1, 3], (3, "stop", "ab", "d")),
        ({"stop": ["x", "da"]}, [3, 0, 1, 3], (2, "stop", "da", "")),
        ({"stop": "ab", "max_tokens": 3}, [3, 0, 1], (3, "stop", "ab", "d")),
        ({"stop": "ab", "stop_token_ids": [1]}, [3, 0, 1], (3, "stop", 1, "d")),
        ({"stop": "bc", "max_tokens": 2}, [0, 1], (2, "length", None, "a")),
        ({"min_tokens": 3}, [EOS, EOS, EOS, EOS], (3, "stop", None, None)),
        ({"min_tokens": 3, "stop_token_ids": [0]}, [0, 0, 1, 0], (4, "stop", 0, None)),
        ({"min_tokens": 3, "stop": "a"}, [0, 1, 0], (3, "stop", "a", "ab")),
        ({"min_tokens": 4, "stop": "aba"}, [0, 1, 0, 1, 0], (5, "stop", "aba", "ab")),
        ({"min_tokens": 3, "stop": ["b", "abd"]}, [0, 1, 3], (3, "stop", "abd", "")),
        ({"min_tokens": 3, "stop": ["b", "abd"]}, [0, 1, 4, 1], (4, "stop", "b", "abe")),
        ({"min_tokens": 3, "max_tokens": 3, "stop": "a"}, [0, 1, 3], (3, "length", None, "abd")),
    ],
)
def test_the_rules(params: dict[str, Any], tokens: list[int], expected: tuple[Any, ...]) -> None:
    assert ends(SamplingParams(**{"max_tokens": 50, **params}), tokens) == expected


def test_the_models_length_ends_a_request_whatever_min_tokens_says() -> None:
    params = SamplingParams(max_tokens=50, min_tokens=40)
    assert ends(params, [EOS] * 50, max_model_len=10) == (9, "length", None, None)


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 1.0, "seed": 8, "max_tokens": 60, "ignore_eos": True, **changes}
    )


def by_hand(free: RequestOutput, stop: str) -> tuple[list[int], str]:
    """Where a stop string ends an output: decode() of ever more of the tokens that come without.
    Its last character is whole, which nothing that follows can change."""
    for end in count(1):
        text = decode(free.token_ids[:end])
        if stop in text:
            return free.token_ids[:end], text[: text.index(stop)]
    raise AssertionError


def test_text_is_cut_before_the_stop_string_and_tokens_are_kept(speaking: LLM) -> None:
    free = speaking.generate(PROMPTS, params())
    stops = []  # four characters from the middle of each, over several tokens
    for output in free:
        assert output.text is not None
        whole = [i for i, c in enumerate(output.text) if c != "\N{REPLACEMENT CHARACTER}"]
        end = next(i for i in whole if i >= 20)
        stops.append(output.text[end - 3 : end + 1])
    found = speaking.generate(PROMPTS, [params(stop=["never there", stop]) for stop in stops])
    streamed: dict[int, str] = {}
    for update in speaking.stream(PROMPTS, [params(stop=[stop, "nor this"]) for stop in stops]):
        streamed[update.index] = streamed.get(update.index, "") + (update.text or "")
    for output, without, stop in zip(found, free, stops, strict=True):
        tokens, text = by_hand(without, stop)
        assert (output.token_ids, output.text) == (tokens, text)
        assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, stop)
        assert output.token_times_s and len(output.token_times_s) == len(tokens)
    assert [streamed[i] for i in range(3)] == [output.text for output in found]


def test_a_stop_string_that_never_comes_changes_nothing(speaking: LLM) -> None:
    free = speaking.generate(PROMPTS, params())
    watched = speaking.generate(PROMPTS, params(stop="never there"))
    for output, without in zip(watched, free, strict=True):
        assert (output.token_ids, output.text) == (without.token_ids, without.text)
        assert (output.finish_reason, output.stop_reason) == (FinishReason.LENGTH, None)


def test_ids_with_a_stop_string_get_text(speaking: LLM) -> None:
    free = speaking.generate([[5, 6, 7]], params())[0]
    assert free.text is None
    whole = decode(free.token_ids)
    stop = whole[10:12]
    output = speaking.generate([[5, 6, 7]], params(stop=stop))[0]
    assert output.text == whole[: whole.index(stop)] and output.stop_reason == stop


def test_a_stop_id_ends_a_request_and_is_kept(speaking: LLM) -> None:
    free = speaking.generate(PROMPTS, params())
    for prompt, without in zip(PROMPTS, free, strict=True):
        stop = without.token_ids[30]
        output = speaking.generate([prompt], params(stop_token_ids=[stop]))[0]
        expected = without.token_ids[: without.token_ids.index(stop) + 1]
        assert (output.token_ids, output.text) == (expected, decode(expected))
        assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, stop)


def test_nothing_ends_a_request_before_min_tokens(speaking: LLM) -> None:
    stop = [*range(3, 290)]
    for output in speaking.generate(
        PROMPTS, params(stop_token_ids=stop, min_tokens=20, stop=["a"])
    ):
        assert len(output.token_ids) >= 20
    for output in speaking.generate(PROMPTS, params(stop_token_ids=stop)):
        assert len(output.token_ids) < 20


def test_without_a_tokenizer_only_what_needs_it_is_refused(checkpoints: Checkpoints) -> None:
    path = checkpoints()
    prompts: list[Any] = [[1, 2], [1, 2], "text", [3]]
    each = [params(), params(stop="a"), params(), params()]
    with small_engine(path) as llm:
        outputs = llm.generate(prompts, each)
    for output in outputs[1:3]:
        assert output.finish_reason is FinishReason.ERROR and output.token_ids == []
        assert f"{path} has no tokenizer (tokenizer.json" in str(output.error)
    assert [len(output.token_ids) for output in outputs[::3]] == [60, 60]


def test_a_damaged_tokenizer_is_named(checkpoints: Checkpoints, tmp_path: Path) -> None:
    for file in checkpoints().iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "tokenizer.json").write_text("{")
    with small_engine(tmp_path) as llm:
        bad, good = llm.generate(["text", [1, 2]], params())
    assert f"the tokenizer in {tmp_path} does not load" in str(bad.error)
    assert len(good.token_ids) == 60
