"""nano-vLLM behind the protocol: its own steps, each stamped when it comes back."""

from __future__ import annotations

import atexit
import gc
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from harness.backends.nanovllm_steps import Steps
from harness.backends.peer import NO_SEAM, PHASES, Peer, check, output, use_cache_dir
from harness.machine.models import with_weights
from harness.observers.records import DECODE, PREFILL

if TYPE_CHECKING:
    from engine.requests.request import RequestOutput
    from engine.requests.sampling_params import SamplingParams

LARGEST_GRAPH = 512
"""Larger decode batches are launched, whatever enforce_eager says."""


class NanoVllmBackend(Peer):
    """nanovllm.LLM, driven by add_request() and step() as its generate() does (version 0.2.0).

    step() returns once the tokens are on the host, so a stamp after it is what a user would see. It
    names the requests that ended; which of the others got a token follows from its queue: a prefill
    step gives one to each request that has come into it, a decode step to the first ones in it.
    """

    name = "nanovllm"
    lacks: Mapping[str, str] = MappingProxyType(NO_SEAM)
    notes: tuple[str, ...] = (
        "nano-vLLM's prefix cache cannot be switched off; no two repeats have equal prompts",
        "nano-vLLM compiles four of its functions with torch.compile, in every mode",
    )

    def start(
        self, cfg: dict[str, Any], cache_dir: str | Path | None, since_s: float | None = None
    ) -> None:
        """What writing a dummy checkpoint takes counts as no start-up: the engine needs files."""
        begin = time.perf_counter() if since_s is None else since_s
        if self.effective:
            raise RuntimeError("the backend was started already; close it first")
        from engine.shape import ModelShape

        writing = time.perf_counter()
        folder = with_weights(cfg["model"])
        begin += time.perf_counter() - writing
        self._shape = ModelShape.from_hf(folder)
        use_cache_dir(cache_dir)
        import nanovllm

        settings = {
            "max_model_len": cfg["engine"]["max_model_len"],
            "max_num_seqs": cfg["engine"]["max_num_seqs"],
            "max_num_batched_tokens": cfg["engine"]["max_num_batched_tokens"],
            "gpu_memory_utilization": cfg["engine"]["memory_utilization"],
            "tensor_parallel_size": cfg["tp"],
            "enforce_eager": cfg["enforce_eager"],
        }
        self._params = nanovllm.SamplingParams
        self._llm: Any = nanovllm.LLM(
            str(folder), **{k: v for k, v in settings.items() if v is not None}
        )
        self.startup = dict.fromkeys(PHASES, None) | {"total_s": time.perf_counter() - begin}
        self._counts = {"preemptions": 0, "cached_tokens": 0}
        runs = self._llm.model_runner.config
        self.effective = {
            "tp": runs.tensor_parallel_size,
            "enforce_eager": runs.enforce_eager,
            "compile": "off",
            "attention": "flash2",
            "comm": "nccl",
            "page_size": runs.kvcache_block_size,
            "dtype": str(runs.hf_config.dtype).removeprefix("torch."),
            "device": "cuda",
            "load_format": cfg["model"]["load_format"],
            "mode": "eager" if runs.enforce_eager else "graph",
            "max_model_len": runs.max_model_len,
            "max_num_seqs": runs.max_num_seqs,
            "max_num_batched_tokens": runs.max_num_batched_tokens,
            "memory_utilization": runs.gpu_memory_utilization,
            "num_pages": runs.num_kvcache_blocks,
            "threads_per_rank": None,
            "prefix_cache": True,
            "overlap": False,
        }

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        arrivals_s: Sequence[float] | None = None,
    ) -> list[RequestOutput]:
        """Raises ValueError: what nano-vLLM would leave out, greedy decoding among it."""
        check(self.name, params)
        greedy = [own for own in params if own.temperature <= 1e-10]
        if greedy:
            raise ValueError(f"backend=nanovllm: temperature={greedy[0].temperature}: it refuses")
        asked = [
            self._params(temperature=p.temperature, max_tokens=p.max_tokens, ignore_eos=True)
            for p in params
        ]
        begin_s = time.perf_counter()
        arrived = [begin_s + at for at in arrivals_s] if arrivals_s else [begin_s] * len(prompts)
        coming = deque(sorted(range(len(prompts)), key=arrived.__getitem__))
        steps = Steps(self._llm.scheduler)
        while coming or not self._llm.is_finished():
            while coming and arrived[coming[0]] <= time.perf_counter():
                number = coming.popleft()
                self._llm.add_request(list(prompts[number]), asked[number])
                steps.add(number)
            if self._llm.is_finished():
                time.sleep(max(0.0, arrived[coming[0]] - time.perf_counter()))
                continue
            steps.take(self._llm.step)
        return self._outputs(steps, prompts, arrived)

    def _outputs(
        self, steps: Steps, prompts: Sequence[Sequence[int]], arrived: Sequence[float]
    ) -> list[RequestOutput]:
        preemptions = steps.preemptions()
        cached = sum(map(len, prompts)) - sum(s.tokens for s in steps.steps if s.prefill)
        self._counts["preemptions"] += preemptions
        if preemptions:
            self._counts.pop("cached_tokens", None)
        elif "cached_tokens" in self._counts:
            self._counts["cached_tokens"] += cached
        given = steps.given()
        begun, times = steps.times(given)
        for step, served in zip(steps.steps, given, strict=True):
            size = step.tokens
            replayed = not step.prefill and self._replays(size)
            self.log_step(
                phase=PREFILL if step.prefill else DECODE,
                batch=max(1, len(served)) if step.prefill else size,
                tokens=size,
                bucket=self._bucket(size) if replayed else size,
                samples=len(served),
                begin_s=step.begin_s,
                end_s=step.end_s,
                replayed=replayed,
            )
        return [
            output(
                number, prompt, steps.outputs[number], arrival_s=arrived[number],
                begin_s=begun[number], times_s=times[number],
                preemptions=None if preemptions else 0,
                cached_tokens=None if preemptions or cached else 0,
            )
            for number, prompt in enumerate(prompts)
        ]  # fmt: skip

    def _replays(self, batch: int) -> bool:
        return not self.effective["enforce_eager"] and batch <= LARGEST_GRAPH

    def _bucket(self, batch: int) -> int:
        return next(int(size) for size in self._llm.model_runner.graph_bs if size >= batch)

    def counters(self) -> dict[str, int]:
        """What is compiled is counted in this process, which is rank 0's. cached_tokens cannot be
        told from recomputed ones: once requests were preempted it is counted no more."""
        from engine.execution.forward import compile_counters

        return {**compile_counters(), **self._counts}

    def memory(self) -> list[dict[str, int | None]]:
        """Of rank 0 alone, which is this process."""
        import torch

        peaks = [torch.cuda.max_memory_allocated(), *[None] * (self.effective["tp"] - 1)]
        return [{"peak_bytes": peak} for peak in peaks]

    def close(self) -> None:
        if self.effective:
            self.effective = {}
            atexit.unregister(self._llm.exit)  # which is not repeatable
            self._llm.exit()
            del self._llm
            gc.collect()
