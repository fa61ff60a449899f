"""Intake: prompts, parameters and ids as callers give them -> calls of the engine."""

from __future__ import annotations

import itertools
import operator
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from numbers import Real
from typing import Any

from engine.errors import RequestError
from engine.frontend.call import Call
from engine.requests.request import Request
from engine.requests.sampling_params import SamplingParams
from engine.requests.tokenizer import Tokenizer

Prompt = str | Sequence[int]
# Odd and unlike each other, so that consecutive requests and samples get distant, distinct seeds.
_SEED_STEP = 0x9E3779B97F4A7C15
_SAMPLE_STEP = 0xD1B54A32D192ED03
_NAMELESS = "#{}"  # the id of a request that was given none, by its ordinal
_RESERVED = re.compile(r"#[0-9]+")


class Intake:
    """Numbers requests, encodes prompts, derives seeds. Any thread may call.

    Args:
        seed: of the engine; requests without one of their own get it plus a step per ordinal.
    """

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._tokenizer = tokenizer
        self._seed = seed
        self._ordinals = itertools.count()

    def calls(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        request_ids: Sequence[str] | None = None,
        arrivals_s: Sequence[float] | None = None,
        streams: bool = False,
    ) -> list[Call]:
        """One call a prompt. One that cannot be read is refused, which the call says.

        Raises:
            RequestError: as many params, ids or arrivals as prompts are needed, of their types;
                arrivals in [0, threading.TIMEOUT_MAX] s, 292 years.
        """
        if isinstance(request_ids, str):
            raise RequestError(f"request_ids={request_ids!r} is one text: give a list, one each")
        count = len(prompts)
        if params is None:
            params = SamplingParams()
        each = [params] * count if isinstance(params, SamplingParams) else list(params)
        ids = [None] * count if request_ids is None else list(request_ids)
        offsets = [0.0] * count if arrivals_s is None else list(arrivals_s)
        for name, given in (("params", each), ("request_ids", ids), ("arrivals_s", offsets)):
            if len(given) != count:
                raise RequestError(f"{len(given)} {name} for {count} prompts: give one each")
        _check_types("params", each, SamplingParams)
        _check_types("request_ids", [] if request_ids is None else ids, str)
        _check_types("arrivals_s", offsets, Real)
        for offset in offsets:
            if not 0 <= offset <= threading.TIMEOUT_MAX:  # nor NaN
                raise RequestError(
                    f"arrivals_s: {offset!r} is no time to wait for: give seconds from the call, "
                    f"0 to {threading.TIMEOUT_MAX:.0f}"
                )
        now = time.perf_counter()
        rows = zip(prompts, each, ids, offsets, strict=True)
        return [
            self._call(index, prompt, param, request_id, now + float(offset), streams)
            for index, (prompt, param, request_id, offset) in enumerate(rows)
        ]

    def _call(
        self,
        index: int,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None,
        arrival_s: float,
        streams: bool,
    ) -> Call:
        ordinal = next(self._ordinals)
        try:
            prompt_ids, refusal = self._encode(prompt), None
        except RequestError as error:
            prompt_ids, refusal = [], str(error)
        if request_id is None:
            request_id = _NAMELESS.format(ordinal)
        elif _RESERVED.fullmatch(request_id):
            refusal = (
                f"request_id={request_id!r} is what the engine calls requests without an id: give "
                "another, or none"
            )
        derived = (self._seed + (ordinal + 1) * _SEED_STEP) % 2**63
        seed = derived if params.seed is None else params.seed
        later = params  # of samples 1 ..: they share the prompt, so its log-probabilities too
        if params.prompt_logprobs is not None:
            later = replace(params, prompt_logprobs=None)
        leader = str(ordinal)
        requests = [
            Request(
                leader if sample == 0 else f"{leader}.{sample}",
                prompt_ids,
                params if sample == 0 else later,
                (seed + sample * _SAMPLE_STEP) % 2**63,
                arrival_s,
                leader_id=None if sample == 0 else leader,
                streams=streams,
            )
            for sample in range(params.n)
        ]
        wants_text = isinstance(prompt, str) or params.stop
        decode = self._tokenizer.decode if wants_text else None
        call = Call(request_id, index, requests, decode)
        if refusal is not None:
            call.refuse(refusal)
        return call

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self._tokenizer.encode(prompt)
        try:
            return [operator.index(token) for token in prompt]
        except TypeError as error:
            raise RequestError(
                f"a prompt is a text or a sequence of integer token ids: {error}"
            ) from error


def _check_types(name: str, values: Sequence[Any], kind: type) -> None:
    for value in values:
        if not isinstance(value, kind):
            raise RequestError(
                f"{name}: {value!r} is a {type(value).__name__}: give {kind.__name__}"
            )
