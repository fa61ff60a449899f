"""transformers' greedy continuation, token by token in float32."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from engine import LLM, FinishReason, SamplingParams
from tests.support.checkpoints import reference_logits

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@cache
def greedy_reference(path: Path, prompt: tuple[int, ...], tokens: int) -> tuple[int, ...]:
    """The `tokens` ids that transformers' argmax adds to the prompt; EOS does not end it."""
    ids = list(prompt)
    for _ in range(tokens):
        ids.append(int(reference_logits(path, ids)[-1].argmax()))
    return tuple(ids[len(prompt) :])


def assert_greedy(path: Path, llm: LLM, prompts: list[list[int]]) -> None:
    """One call with all prompts gives each the tokens of transformers."""
    outputs = llm.generate(prompts, GREEDY)
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = greedy_reference(path, tuple(prompt), GREEDY.max_tokens)
        assert tuple(output.token_ids) == expected, f"prompt of {len(prompt)} tokens"
        assert output.finish_reason is FinishReason.LENGTH
