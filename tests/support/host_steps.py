"""The host's work of a step without a device: rank 0's core, and inputs laid out for nobody."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import torch

from engine.core import EngineCore
from engine.execution.launched import Launched
from engine.inputs.buffers import BatchBuffers
from engine.requests.request import Request
from engine.requests.sampling_params import SamplingParams
from engine.sampling.plan import SamplingPlan
from engine.scheduling.step import StepPlan

PAGE = 16
PARAMS = SamplingParams(temperature=0, max_tokens=1 << 20, ignore_eos=True)
VOCAB = 512


class FakeDevice:
    """What EngineCore needs of a runner; the message to the other ranks and the inputs of the
    forward are made as a rank makes them, and every sampled id is 1.

    Attributes:
        message_bytes: of the last step's plan.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, num_pages: int, depth: int) -> None:
        self.config = SimpleNamespace(
            model="no such folder",
            page_size=PAGE,
            num_pages=num_pages,
            prefix_cache=True,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max(8192, max_num_seqs * PAGE),
            max_model_len=max_model_len,
            overlap=depth == 2,
        )
        self.shape = SimpleNamespace(eos_token_ids=(0,), vocab_size=VOCAB)
        self.message_bytes = 0
        self._ids = torch.ones(max_num_seqs, dtype=torch.int64)
        self._buffers = BatchBuffers(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            max_model_len=max_model_len,
            page_size=PAGE,
            dummy_page=num_pages,
            device=torch.device("cpu"),
        )

    def launch(self, plan: StepPlan, sampling: SamplingPlan | None) -> Launched:
        assert sampling is None
        self.message_bytes = len(plan.to_bytes())
        self._buffers.load(plan, plan.num_tokens)
        return Launched(self._ids[: int(plan.samples.sum())])

    def collect(self, launched: Launched) -> list[int]:
        assert launched.ids is not None
        ids: list[int] = launched.ids.tolist()
        return ids

    def record_wall(self, step: int, begin_ns: int, end_ns: int) -> None:
        assert begin_ns <= end_ns


class HostSteps:
    """`batch` requests of `context` tokens each that decode, step by step.

    All have the same prompt, which the first computes: the others find its pages, or 1,024 prompts
    of 32k tokens would be 33 million tokens to lay out first.

    Args:
        longest: room for one request, which sets the width of the block tables; give the same for
            contexts that are to be compared.
        depth: steps in flight at most; 2 is overlapped scheduling.

    Attributes:
        device: the fake one.
        steps: how many steps the requests can take before one is too long.
    """

    def __init__(self, batch: int, context: int, longest: int, depth: int = 2) -> None:
        assert context + PAGE < longest, (context, longest)
        pages = longest // PAGE + batch * (2 + (longest - context) // PAGE)
        self.device = FakeDevice(batch, longest, pages, depth)
        self._core = EngineCore(self.device)  # type: ignore[arg-type]
        self.steps = longest - context - 2 * depth - 1
        prompt = [1 + i % (VOCAB - 1) for i in range(context)]
        self.requests = [self._request(str(i), prompt) for i in range(batch)]
        self._core.add(self.requests[0])
        while not self.requests[0].output_ids:
            self._core.step()
        for request in self.requests[1:]:
            self._core.add(request)
        while not all(r.output_ids for r in self.requests):
            self._core.step()

    @staticmethod
    def _request(name: str, prompt: list[int]) -> Request:
        return Request(name, prompt, PARAMS, 0, time.perf_counter())

    def run(self, steps: int) -> Any:
        """Plans, lays out and books as many steps; -> the last step's results."""
        for _ in range(steps):
            results = self._core.step()
        return results
