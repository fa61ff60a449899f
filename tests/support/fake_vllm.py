"""Modules with vLLM's interface and no model: they record what is asked, and stamp tokens."""

from __future__ import annotations

import enum
import sys
import time
import types
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch


class RequestOutputKind(enum.Enum):
    CUMULATIVE = 0
    FINAL_ONLY = 2


class CUDAGraphMode(enum.Enum):
    NONE = 0
    FULL_DECODE_ONLY = 1
    FULL_AND_PIECEWISE = 2


@dataclass(kw_only=True)
class SamplingParams:
    temperature: float = 1.0
    max_tokens: int = 16
    ignore_eos: bool = False
    detokenize: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE


@dataclass
class Request:
    name: str
    prompt: list[int]
    params: SamplingParams
    stamps: types.SimpleNamespace
    tokens: list[int] = field(default_factory=list)


class Engine:
    """Each step gives the first max_num_seqs requests a token, and tells of those that ended."""

    def __init__(self, options: dict[str, Any]) -> None:
        compilation = options["compilation_config"]
        self.vllm_config = types.SimpleNamespace(
            model_config=types.SimpleNamespace(
                dtype=getattr(torch, options["dtype"]), seed=options["seed"],
                max_model_len=options.get("max_model_len", 4096),
            ),
            cache_config=types.SimpleNamespace(
                block_size=options.get("block_size", 16), num_gpu_blocks=512,
                gpu_memory_utilization=options["gpu_memory_utilization"],
                enable_prefix_caching=options["enable_prefix_caching"],
            ),
            compilation_config=types.SimpleNamespace(
                mode=compilation["mode"],
                cudagraph_mode=CUDAGraphMode[compilation["cudagraph_mode"]],
                cudagraph_capture_sizes=[1, 2, 4],
            ),
            scheduler_config=types.SimpleNamespace(
                max_num_seqs=options["max_num_seqs"], async_scheduling=options["async_scheduling"],
                max_num_batched_tokens=options.get("max_num_batched_tokens", 8192),
            ),
            parallel_config=types.SimpleNamespace(
                tensor_parallel_size=options["tensor_parallel_size"]
            ),
            load_config=types.SimpleNamespace(load_format=options["load_format"]),
        )  # fmt: skip
        self.requests: list[Request] = []
        self.added: list[tuple[str, list[int], SamplingParams]] = []
        self.resets = 0
        self.shut = 0
        self.reason = "length"
        self.withheld = 0
        self.engine_core = types.SimpleNamespace(shutdown=self._shutdown)

    def _shutdown(self) -> None:
        self.shut += 1

    def add_request(self, name: str, prompt: dict[str, Any], params: SamplingParams) -> str:
        assert prompt["type"] == "token" and params.output_kind is RequestOutputKind.FINAL_ONLY
        self.added.append((name, prompt["prompt_token_ids"], params))
        stamps = types.SimpleNamespace(
            queued_ts=time.monotonic(), scheduled_ts=0.0, first_token_ts=0.0, last_token_ts=0.0
        )
        self.requests.append(Request(name, prompt["prompt_token_ids"], params, stamps))
        return f"{name}-internal"

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def step(self) -> list[Any]:
        batch = self.requests[: self.vllm_config.scheduler_config.max_num_seqs]
        for one in batch:
            one.stamps.scheduled_ts = one.stamps.scheduled_ts or time.monotonic()
        time.sleep(0.001)
        now, ended = time.monotonic(), []
        for one in batch:
            one.tokens.append(len(one.tokens))
            one.stamps.first_token_ts = one.stamps.first_token_ts or now
            one.stamps.last_token_ts = now
            if len(one.tokens) == one.params.max_tokens:
                self.requests.remove(one)
                tokens = one.tokens[: len(one.tokens) - self.withheld]
                ended.append(_output(one, tokens, self.reason))
        return ended

    def reset_prefix_cache(self) -> None:
        self.resets += 1


def _output(one: Request, tokens: list[int], reason: str) -> Any:
    completion = types.SimpleNamespace(token_ids=tokens, finish_reason=reason)
    return types.SimpleNamespace(
        request_id=one.name, finished=True, outputs=[completion], metrics=one.stamps,
        num_cached_tokens=0,
    )  # fmt: skip


class LLM:
    made: list[LLM] = []  # noqa: RUF012

    def __init__(self, model: str, **options: Any) -> None:
        self.model, self.options = model, options
        self.llm_engine = Engine(options)
        LLM.made.append(self)

    def get_metrics(self) -> list[Any]:
        values = {"vllm:num_preemptions": 3, "vllm:prefix_cache_hits": 0, "vllm:other": 1}
        return [types.SimpleNamespace(name=name, value=value) for name, value in values.items()]


def tokens_input(prompt_token_ids: list[int]) -> dict[str, Any]:
    return {"type": "token", "prompt_token_ids": prompt_token_ids}


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts the modules where the backend imports them."""
    contents: dict[str, dict[str, Any]] = {
        "vllm": {"LLM": LLM, "SamplingParams": SamplingParams, "__version__": "0.20.2"},
        "vllm.inputs": {"tokens_input": tokens_input},
        "vllm.sampling_params": {"RequestOutputKind": RequestOutputKind},
    }
    for name, attributes in contents.items():
        module = types.ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(LLM, "made", [])
