"""SamplingParams: how to sample one request, checked when it is made"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import RequestError

MAX_LOGPROBS = 64
"""Alternatives that a step reports for a token at most; more would be a table, not a look."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample one request. Frozen, so one object can serve many requests.

    A token is chosen in this order: penalties and `logit_bias` change the logits, EOS and stop ids
    are masked until `min_tokens`, the temperature divides, then top-k, top-p and min-p each leave
    out what they leave out of the distribution that the one before it left, and the race of
    sampler.py runs over the rest.

    Attributes:
        temperature: 0 is greedy (exact argmax); otherwise logits are divided by it.
        top_k: only the k most probable tokens; None: all.
        top_p: only the smallest set of most probable tokens that holds this much probability, in
            (0, 1]; 1: all (Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020).
        min_p: only tokens at least this fraction as probable as the most probable one, in [0, 1].
        repetition_penalty: logits of tokens that the prompt or the output holds are divided by it
            where positive, multiplied where negative; 1: none (Keskar et al., "CTRL", 2019).
        presence_penalty: taken off the logits of tokens that the output holds.
        frequency_penalty: taken off them as often as the output holds them.
        logit_bias: token id -> what is added to its logit; a mapping or pairs, kept as pairs.
        max_tokens: number of tokens to generate at most; min_tokens: before that many are
            generated neither an EOS nor a stop token is sampled, and no stop string ends it.
        ignore_eos: go on after an EOS token.
        stop_token_ids: further tokens that end the request; they stay in the output, as EOS does.
        stop: texts that end the request; the output's text is cut before the first of them.
        seed: noise is a function of (seed, position, token id) alone; None: derived from the
            engine's seed and the request's ordinal.
        logprobs: log-probabilities of the sampled token and of so many most probable ones, of the
            model's own distribution, before anything above; None: none.
        prompt_logprobs: the same for each prompt token but the first; such a prompt takes nothing
            from the prefix cache, whose tokens have no logits.
        n: outputs of the prompt; output i > 0 has a seed derived from this one's and i.

    Raises:
        RequestError: a value outside its range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()
    max_tokens: int = 64
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: Sequence[int] = ()
    stop: str | Sequence[str] = ()
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1

    def __post_init__(self) -> None:
        self._normalise()
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise RequestError(
                f"temperature={self.temperature}: give a finite number >= 0 (0 is greedy)"
            )
        _integer("top_k", self.top_k, 1, none="all tokens")
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top_p={self.top_p}: give a number in (0, 1] (1 is all tokens)")
        if not 0 <= self.min_p <= 1:
            raise RequestError(f"min_p={self.min_p}: give a number in [0, 1] (0 is all tokens)")
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise RequestError(
                f"repetition_penalty={self.repetition_penalty}: give a finite number > 0 "
                "(1 is none)"
            )
        for name in ("presence_penalty", "frequency_penalty"):
            if not math.isfinite(getattr(self, name)):
                raise RequestError(
                    f"{name}={getattr(self, name)}: give a finite number (0 is none)"
                )
        for token, bias in self.logit_bias:  # type: ignore[misc]
            _integer("logit_bias: token id", token, 0)
            if not math.isfinite(bias):
                raise RequestError(f"logit_bias of token {token} is {bias}: give a finite number")
        _integer("max_tokens", self.max_tokens, 1)
        _integer("min_tokens", self.min_tokens, 0)
        if self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens={self.min_tokens}: must be at most max_tokens={self.max_tokens}"
            )
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0)
        for text in self.stop:
            if not (isinstance(text, str) and text):
                raise RequestError(f"stop={text!r}: give texts that are not empty")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise RequestError(f"seed={self.seed}: give an integer in [0, 2^63)")
        for name in ("logprobs", "prompt_logprobs"):
            _integer(name, getattr(self, name), 0, MAX_LOGPROBS, none="no log-probabilities")
        _integer("n", self.n, 1)

    def _normalise(self) -> None:
        """Collections become tuples, so that the object is hashable and nobody can change it."""
        bias: Any = self.logit_bias
        pairs = bias.items() if isinstance(bias, Mapping) else bias
        values = {
            "logit_bias": tuple((token, float(value)) for token, value in pairs),
            "stop_token_ids": tuple(self.stop_token_ids),
            "stop": (self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def plain(self) -> bool:
        """Whether temperature and seed say all: such a row is sampled inside a CUDA graph."""
        return (
            self.top_k is None
            and self.top_p == 1
            and self.min_p == 0
            and self.repetition_penalty == 1
            and self.presence_penalty == 0
            and self.frequency_penalty == 0
            and not self.logit_bias
            and self.min_tokens == 0
            and self.logprobs is None
        )


def _integer(
    name: str, value: Any, least: int, most: int | None = None, none: str | None = None
) -> None:
    if value is None and none is not None:
        return
    limit = f"of at least {least}" if most is None else f"in [{least}, {most}]"
    alternative = f", or None ({none})" if none is not None else ""
    out = not isinstance(value, int) or isinstance(value, bool) or value < least
    if out or (most is not None and value > most):
        raise RequestError(f"{name}={value!r}: give an integer {limit}{alternative}")
