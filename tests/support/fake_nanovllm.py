"""A module with nano-vLLM's interface and the rules of its queue, and no model: it records what it
was asked, and says token n of a sequence is 1000 * its id + n."""

from __future__ import annotations

import itertools
import sys
import types
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

_IDS = itertools.count(7)  # of the whole process, as in nano-vLLM


@dataclass(slots=True)
class SamplingParams:
    temperature: float = 1.0
    max_tokens: int = 64
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        assert self.temperature > 1e-10, "greedy sampling is not permitted"


@dataclass
class Sequence:
    prompt: list[int]
    params: SamplingParams
    seq_id: int = field(default_factory=lambda: next(_IDS))
    output: list[int] = field(default_factory=list)
    computed: int = 0

    @property
    def left(self) -> int:
        return len(self.prompt) + len(self.output) - self.computed


class LLM:
    """Prompts first; of them only one that has a step to itself is cut. The pool takes `pool`
    tokens; when they are used up the last sequence in the queue loses its place."""

    made: list[LLM] = []  # noqa: RUF012
    pool = 10**9
    cached = 0
    """Tokens of each prompt that its prefix cache has."""

    def __init__(self, model: str, **options: Any) -> None:
        assert Path(model).is_dir()
        self.model, self.options = model, options
        self.asked: list[tuple[list[int], SamplingParams]] = []
        self.exits = 0
        known = {
            "max_num_batched_tokens": 16384, "max_num_seqs": 512, "max_model_len": 4096,
            "gpu_memory_utilization": 0.9, "tensor_parallel_size": 1, "enforce_eager": False,
        }  # fmt: skip
        settings = {k: options.get(k, v) for k, v in known.items()}  # others are dropped in silence
        self.config = types.SimpleNamespace(
            **settings, kvcache_block_size=256, num_kvcache_blocks=99,
            hf_config=types.SimpleNamespace(dtype=torch.bfloat16),
        )  # fmt: skip
        seqs = min(self.config.max_num_seqs, 512)
        self.model_runner = types.SimpleNamespace(
            config=self.config, graph_bs=[1, 2, 4, 8, *range(16, seqs + 1, 16)]
        )
        self.scheduler = types.SimpleNamespace(waiting=deque(), running=deque())
        LLM.made.append(self)

    def add_request(self, prompt: list[int], params: SamplingParams) -> None:
        self.asked.append((prompt, params))
        self.scheduler.waiting.append(Sequence(prompt, params))

    def is_finished(self) -> bool:
        return not self.scheduler.waiting and not self.scheduler.running

    def step(self) -> tuple[list[tuple[int, list[int]]], int]:
        prompts = self._prompts()
        return prompts if prompts is not None else self._decode()

    def _prompts(self) -> tuple[list[tuple[int, list[int]]], int] | None:
        waiting, room = self.scheduler.waiting, self.config.max_num_batched_tokens
        whole: list[Sequence] = []
        while waiting and room and self._used() + waiting[0].left <= self.pool:
            first = waiting[0]
            if not first.computed:
                first.computed = self.cached
            if first.left > room:
                if whole:
                    break
                first.computed += room
                return [], room
            room -= first.left
            first.computed += first.left
            whole.append(waiting.popleft())
            self.scheduler.running.append(first)
        if not whole:
            return None
        return self._sample(whole), self.config.max_num_batched_tokens - room

    def _decode(self) -> tuple[list[tuple[int, list[int]]], int]:
        running = self.scheduler.running
        while self._used() + len(running) > self.pool:
            lost = running.pop()
            lost.computed = 0
            self.scheduler.waiting.appendleft(lost)
        batch = list(running)[: self.config.max_num_seqs]
        for sequence in batch:
            sequence.computed += 1
        return self._sample(batch), -len(batch)

    def _used(self) -> int:
        return sum(s.computed for s in self.scheduler.running)

    def _sample(self, batch: list[Sequence]) -> list[tuple[int, list[int]]]:
        ended = []
        for sequence in batch:
            sequence.output.append(1000 * sequence.seq_id + len(sequence.output))
            if len(sequence.output) == sequence.params.max_tokens:
                self.scheduler.running.remove(sequence)
                ended.append((sequence.seq_id, sequence.output))
        return ended

    def exit(self) -> None:
        assert not self.exits, "exit() is not repeatable"
        self.exits += 1


def install(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
    """Puts the module where the backend imports it; `settings`: attributes of LLM."""
    module = types.ModuleType("nanovllm")
    module.LLM, module.SamplingParams = LLM, SamplingParams  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nanovllm", module)
    monkeypatch.setattr(LLM, "made", [])
    for name, value in settings.items():
        monkeypatch.setattr(LLM, name, value)
