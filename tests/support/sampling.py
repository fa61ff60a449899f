"""Sampling in float64 and plain integers: what a request's tokens must be, step by step."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np

from engine.requests.sampling_params import SamplingParams
from tests.support.checkpoints import reference_logits

MASK = 0xFFFFFFFF


def philox_reference(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """Philox4x32-10 in plain integers, written from the paper (section 3.3, figure 4)."""
    left0, right0, left1, right1 = counter[1], counter[0], counter[3], counter[2]
    key0, key1 = key
    for _ in range(10):
        high0, low0 = divmod(right0 * 0xD2511F53, 1 << 32)
        high1, low1 = divmod(right1 * 0xCD9E8D57, 1 << 32)
        right0, left0, right1, left1 = high1 ^ left0 ^ key0, low1, high0 ^ left1 ^ key1, low0
        key0, key1 = (key0 + 0x9E3779B9) & MASK, (key1 + 0xBB67AE85) & MASK
    return right0, left0, right1, left1


def race_reference(
    logits: np.ndarray, temperature: float, seed: int, position: int
) -> tuple[int, float]:
    """One row in float64: the id, and how far the second one is behind."""
    if temperature == 0:
        return int(np.argmax(logits)), np.inf
    noise = np.empty(len(logits))
    for token in range(len(logits)):
        if token % 4 == 0:
            counter = (token // 4, position & MASK, position >> 32, 0)
            words = philox_reference(counter, (seed & MASK, seed >> 32))
        u = (words[token % 4] + 0.5) / 2**32
        noise[token] = -np.log(-np.log1p(-u))
    scores = (logits - logits.max()) / temperature + noise
    best = int(np.argmax(scores))
    return best, float(scores[best] - np.delete(scores, best).max(initial=-np.inf))


def penalty_reference(
    logits: np.ndarray,
    prompt: Sequence[int],
    output: Sequence[int],
    repetition: float,
    presence: float,
    frequency: float,
) -> np.ndarray:
    """One row with its penalties, token by token."""
    found = logits.copy()
    for token in {*prompt, *output}:
        value = found[token]
        found[token] = value * repetition if value < 0 else value / repetition
    for token, count in Counter(output).items():
        found[token] -= frequency * count + presence
    return found


def keep_reference(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> np.ndarray:
    """Which tokens of one row stay, by the definitions of SamplingParams, one filter after the
    other -> [V] bool."""
    order = np.lexsort((np.arange(len(logits)), -logits))  # of equals the lower id first
    scaled = logits / temperature
    p = np.exp(scaled - scaled.max())
    left = order[:top_k]
    if top_p < 1:
        share = p[left] / p[left].sum()
        before = np.cumsum(share) - share
        left = left[: int((before < top_p).sum())]
    left = left[p[left] >= min_p * p[left].max()]
    kept = np.zeros(len(logits), bool)
    kept[left] = True
    return kept


def sampled_reference(
    logits: np.ndarray,
    prompt: Sequence[int],
    output: Sequence[int],
    params: SamplingParams,
    eos: Collection[int],
) -> int:
    """The next token of one request, from its raw logits [V]."""
    penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
    found = penalty_reference(logits.astype(np.float64), prompt, output, *penalties)
    for token, bias in params.logit_bias:  # type: ignore[misc]
        found[token] += bias
    if len(output) < params.min_tokens:
        found[[*params.stop_token_ids, *(() if params.ignore_eos else eos)]] = -np.inf
    if params.temperature > 0:
        k = params.top_k or len(found)
        kept = keep_reference(found, params.temperature, k, params.top_p, params.min_p)
        found[~kept] = -np.inf
    assert params.seed is not None
    position = len(prompt) + len(output)
    return race_reference(found, params.temperature, params.seed, position)[0]


def tokens_reference(
    path: Path, prompt: Sequence[int], params: SamplingParams, eos: Collection[int] = (2,)
) -> list[int]:
    """A request's whole output, logits by transformers; an EOS ends it unless ignored."""
    output: list[int] = []
    while len(output) < params.max_tokens:
        logits = reference_logits(path, [*prompt, *output])[-1].numpy()
        output.append(sampled_reference(logits, prompt, output, params, eos))
        if output[-1] in eos and not params.ignore_eos:
            break
    return output


def mixed_prompts() -> list[list[int]]:
    """Sixteen prompts of 1 to 29 tokens, no EOS among them."""
    rng = random.Random(0)
    return [[rng.randrange(3, 97) for _ in range(rng.randrange(1, 30))] for _ in range(16)]


def mixed_params(max_tokens: int = 10) -> list[SamplingParams]:
    """Sixteen requests, each another combination of what can be asked for."""
    many = [
        {"temperature": 0},
        {"temperature": 0.9},
        {"temperature": 0.8, "top_k": 5},
        {"temperature": 1.2, "top_p": 0.7},
        {"temperature": 1.5, "min_p": 0.2},
        {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
        {"temperature": 0, "repetition_penalty": 1.4},
        {"temperature": 0, "presence_penalty": 1.5, "logprobs": 0},
        {"temperature": 0, "frequency_penalty": 0.8},
        {"temperature": 0.7, "repetition_penalty": 1.2, "top_k": 10, "frequency_penalty": 0.3},
        {"temperature": 0, "logit_bias": {5: 4.0, 17: -3.0}, "logprobs": 3},
        {"temperature": 0.9, "min_tokens": 6, "stop_token_ids": [9, 58, 85], "ignore_eos": False},
        {"temperature": 0, "logit_bias": {2: 30.0}, "min_tokens": 4, "ignore_eos": False},
        {"temperature": 1.1, "logprobs": 5, "prompt_logprobs": 2},
        {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "presence_penalty": 0.5, "logprobs": 1},
        {"temperature": 0, "prompt_logprobs": 0},
    ]  # fmt: skip
    return [
        SamplingParams(**{"seed": 100 + i, "max_tokens": max_tokens, "ignore_eos": True, **params})  # type: ignore[arg-type]
        for i, params in enumerate(many)
    ]
