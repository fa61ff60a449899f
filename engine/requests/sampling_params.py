"""SamplingParams: how to sample one request, checked when it is made"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from engine.errors import RequestError

MAX_LOGPROBS = 64
"""Alternatives that a step reports for a token at most; more would be a table, not a look."""

_MOST = 1e30
"""Of every number that meets a logit: whatever the combination, float32 stays finite then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample one request. Frozen, so one object can serve many requests.

    A token is chosen in this order: the repetition penalty, the frequency and the presence penalty
    and `logit_bias` change the logits, EOS and stop ids are masked until `min_tokens`, the
    temperature divides, then top-k, top-p and min-p each leave out what they leave out of the
    distribution that the one before it left, and the race of engine/sampling/sampler.py runs over
    the rest. Among tokens of equal logits the lower id counts as the more probable one, so what is
    left is always defined, and never empty. At temperature 0 the last three have nothing to say.

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
            generated neither an EOS (unless `ignore_eos`) nor a stop token is sampled, and no stop
            string ends it.
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
        plain_from: derived: once so many tokens are generated, temperature and seed say all, and
            the row can be sampled inside a CUDA graph; infinite: never.

    Raises:
        RequestError: a value of another type or outside its range. Temperature, penalties and
            biases are at most 1e30 in size, which float32 holds in any combination.
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
    plain_from: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._normalise()
        _number("temperature", self.temperature, 0, _MOST, "0 is greedy")
        _integer("top_k", self.top_k, 1, none="all tokens")
        if not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise RequestError(f"top_p={self.top_p!r}: give a number in (0, 1] (1 is all tokens)")
        _number("min_p", self.min_p, 0, 1, "0 is all tokens")
        _number("repetition_penalty", self.repetition_penalty, 1 / _MOST, _MOST, "1 is none")
        for name in ("presence_penalty", "frequency_penalty"):
            _number(name, getattr(self, name), -_MOST, _MOST, "0 is none")
        for token, bias in self.logit_bias:  # type: ignore[misc]
            _integer("logit_bias: token id", token, 0)
            _number(f"logit_bias of token {token}", bias, -_MOST, _MOST, "0 is none")
        if len(dict(self.logit_bias)) < len(self.logit_bias):
            raise RequestError(f"logit_bias={self.logit_bias}: name each token id once")
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
        _integer("seed", self.seed, 0, 2**63 - 1, none="derived from the engine's")
        for name in ("logprobs", "prompt_logprobs"):
            _integer(name, getattr(self, name), 0, MAX_LOGPROBS, none="no log-probabilities")
        _integer("n", self.n, 1)
        object.__setattr__(self, "plain_from", self._plain_from())

    def _normalise(self) -> None:
        """Collections become tuples, so that the object is hashable and nobody can change it."""
        bias: Any = self.logit_bias
        try:
            pairs = tuple((t, b) for t, b in (bias.items() if isinstance(bias, Mapping) else bias))
        except (TypeError, ValueError) as error:
            raise RequestError(
                f"logit_bias={bias!r}: give a mapping or pairs of token id and number"
            ) from error
        object.__setattr__(self, "logit_bias", pairs)
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop_token_ids", "stop"):
            value: Any = getattr(self, name)
            try:
                object.__setattr__(self, name, tuple(value))
            except TypeError as error:
                raise RequestError(f"{name}={value!r}: give a sequence") from error

    def _plain_from(self) -> float:
        if self.filtered or self.penalised or self.logit_bias or self.logprobs is not None:
            return math.inf
        return self.min_tokens

    @property
    def filtered(self) -> bool:
        """Whether tokens are left out; never where the most probable one is taken anyway."""
        some = self.top_k is not None or self.top_p < 1 or self.min_p > 0
        return some and self.temperature > 0

    @property
    def penalised(self) -> bool:
        """Whether the row depends on which tokens came before."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )

    def ends(self, eos_token_ids: Collection[int]) -> frozenset[int]:
        """The tokens that end the request when they are sampled."""
        return frozenset(self.stop_token_ids).union(() if self.ignore_eos else eos_token_ids)

    def check_model(self, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        """What only the model tells.

        Raises:
            RequestError: a token id past the vocabulary, or no token left before min_tokens.
        """
        biased = [token for token, _ in self.logit_bias]  # type: ignore[misc]
        for name, tokens in (("logit_bias", biased), ("stop_token_ids", self.stop_token_ids)):
            bad = next((token for token in tokens if token >= vocab_size), None)
            if bad is not None:
                raise RequestError(
                    f"{name}: token id {bad}: this model's ids are in [0, {vocab_size})"
                )
        if self.min_tokens and len(self.ends(eos_token_ids)) >= vocab_size:
            raise RequestError(
                f"min_tokens={self.min_tokens}: each of the {vocab_size} tokens ends the request, "
                "so none can be sampled before; name fewer stop_token_ids"
            )


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _number(name: str, value: Any, least: float, most: float, neutral: str) -> None:
    if not (_is_number(value) and least <= value <= most):  # NaN is in no range
        raise RequestError(f"{name}={value!r}: give a number in [{least:g}, {most:g}] ({neutral})")


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
