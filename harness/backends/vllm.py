"""vLLM behind the protocol: its engine's add_request() and step(), its own time stamps."""

from __future__ import annotations

import gc
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from harness.backends.peer import NO_SEAM, PHASES, Peer, check, output, use_cache_dir
from harness.machine.models import resolve_model

if TYPE_CHECKING:
    from engine.requests.request import RequestOutput
    from engine.requests.sampling_params import SamplingParams

_STEPS = "vLLM does not tell its steps from outside"
COMPILED = {0: "off", 3: "model"}
"""vLLM's CompilationMode -> axis compile: 3 traces the whole model and splits it at attention."""
COUNTED = {"preemptions": "vllm:num_preemptions", "cached_tokens": "vllm:prefix_cache_hits"}


class VllmBackend(Peer):
    """vllm.LLM, driven by its engine's add_request() and step() as generate() does, for requests
    that come over time too (version 0.20).

    The engine core runs in a process of its own, as by default. It stamps when a request was
    scheduled and when its first and last token came, by the clock that perf_counter is on Linux
    (CLOCK_MONOTONIC). Tokens come back once, at the end: handing out each costs the host, which is
    what bounds small models.
    """

    name = "vllm"
    lacks: Mapping[str, str] = MappingProxyType(
        {
            **NO_SEAM,
            **dict.fromkeys(
                ("prefill_tok_s", "decode_tok_s", "step_host_us", "between_steps_us", "padding"),
                _STEPS,
            ),
            "itl": "vLLM stamps a request's first and last token",
        }
    )
    notes: tuple[str, ...] = ("what vLLM compiles or captures inside the window cannot be seen",)

    def start(
        self, cfg: dict[str, Any], cache_dir: str | Path | None, since_s: float | None = None
    ) -> None:
        begin = time.perf_counter() if since_s is None else since_s
        if self.effective:
            raise RuntimeError("the backend was started already; close it first")
        from engine.shape import ModelShape

        folder = resolve_model(cfg["model"])
        self._shape = ModelShape.from_hf(folder)
        use_cache_dir(cache_dir)
        if cache_dir is not None:
            os.environ["VLLM_CACHE_ROOT"] = str(Path(cache_dir) / "vllm")
        os.environ["VLLM_NO_USAGE_STATS"] = "1"
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        import vllm
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        self._vllm, self._input, self._final = vllm, tokens_input, RequestOutputKind.FINAL_ONLY
        self._llm: Any = vllm.LLM(str(folder), **options(cfg, self.shape.dtype))
        self._engine = self._llm.llm_engine
        self._asked = 0
        self.startup = dict.fromkeys(PHASES, None) | {"total_s": time.perf_counter() - begin}
        self.effective = effective(self._engine.vllm_config)
        self.effective["version"] = vllm.__version__

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        arrivals_s: Sequence[float] | None = None,
    ) -> list[RequestOutput]:
        """Raises ValueError: more than a temperature and a length."""
        check(self.name, params)
        asked = [
            self._vllm.SamplingParams(
                temperature=own.temperature, max_tokens=own.max_tokens, ignore_eos=True,
                detokenize=False, output_kind=self._final,
            )
            for own in params
        ]  # fmt: skip
        begin_s = time.perf_counter()
        arrived = [begin_s + at for at in arrivals_s] if arrivals_s else [begin_s] * len(prompts)
        coming = deque(sorted(range(len(prompts)), key=arrived.__getitem__))
        first, self._asked = self._asked, self._asked + len(prompts)
        ended: dict[int, Any] = {}
        while len(ended) < len(prompts):
            while coming and arrived[coming[0]] <= time.perf_counter():
                number = coming.popleft()
                prompt = self._input(list(prompts[number]))
                self._engine.add_request(str(first + number), prompt, asked[number])
            if not self._engine.has_unfinished_requests():
                if not coming:
                    break  # one got lost, which the harness finds by its length
                time.sleep(max(0.0, arrived[coming[0]] - time.perf_counter()))
                continue
            for one in self._engine.step():
                if one.finished:
                    ended[int(one.request_id) - first] = one
        return [
            served(number, prompt, ended.get(number), arrived[number])
            for number, prompt in enumerate(prompts)
        ]

    def counters(self) -> dict[str, int]:
        """From its own metrics; what it compiles is not among them."""
        found = {metric.name: metric for metric in self._llm.get_metrics()}
        return {name: int(found[key].value) for name, key in COUNTED.items() if key in found}

    def memory(self) -> list[dict[str, int | None]]:
        """Its processes do not tell their peaks."""
        return [{"peak_bytes": None} for _ in range(self.effective["tp"])]

    def reset_prefix_cache(self) -> None:
        self._engine.reset_prefix_cache()

    def close(self) -> None:
        if self.effective:
            self.effective = {}
            self._engine.engine_core.shutdown()
            del self._engine, self._llm
            gc.collect()


def options(cfg: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """A resolved configuration -> arguments of vllm.LLM; what is null is left to vLLM. `dtype`: the
    checkpoint's, in which it runs unless the configuration says otherwise (vLLM's own `auto` would
    make float16 of float32).

    Graphs without compilation are those of whole decode steps, since vLLM's piecewise ones need it.
    """
    settings, eager, compiled = cfg["engine"], cfg["enforce_eager"], cfg["compile"] == "model"
    graphs = "NONE" if eager else "FULL_AND_PIECEWISE" if compiled else "FULL_DECODE_ONLY"
    asked = {
        "tensor_parallel_size": cfg["tp"],
        "dtype": dtype if cfg["dtype"] == "auto" else cfg["dtype"],
        "load_format": cfg["model"]["load_format"],
        "enforce_eager": eager and not compiled,
        "compilation_config": {"mode": 3 if compiled else 0, "cudagraph_mode": graphs},
        "block_size": cfg["page_size"],
        "max_model_len": settings["max_model_len"],
        "max_num_seqs": settings["max_num_seqs"],
        "max_num_batched_tokens": settings["max_num_batched_tokens"],
        "num_gpu_blocks_override": settings["num_pages"],
        "gpu_memory_utilization": settings["memory_utilization"],
        "enable_prefix_caching": settings["prefix_cache"],
        "async_scheduling": settings["overlap"] is not False,
        "seed": settings["seed"],
        "skip_tokenizer_init": True,
        "disable_log_stats": False,  # its stamps and counts
    }
    return {name: value for name, value in asked.items() if value is not None}


def effective(runs: Any) -> dict[str, Any]:
    """What a VllmConfig says after the engine has started. Which attention backend its workers
    chose is not in it, nor whether they can capture what `cudagraph_mode` says."""
    model, cache, compilation = runs.model_config, runs.cache_config, runs.compilation_config
    scheduler, mode = runs.scheduler_config, int(compilation.mode)
    graphs = compilation.cudagraph_mode.name
    compiled = COMPILED.get(mode, f"vllm-mode-{mode}")
    forms = ["graph"] * (graphs != "NONE") + [f"compiled-{compiled}"] * (compiled != "off")
    return {
        "tp": runs.parallel_config.tensor_parallel_size,
        "enforce_eager": graphs == "NONE",
        "compile": compiled,
        "attention": None,
        "comm": None,
        "page_size": cache.block_size,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": "cuda",
        "load_format": str(runs.load_config.load_format),
        "mode": "+".join(forms) or "eager",
        "max_model_len": model.max_model_len,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "memory_utilization": cache.gpu_memory_utilization,
        "num_pages": cache.num_gpu_blocks,
        "threads_per_rank": None,
        "prefix_cache": cache.enable_prefix_caching,
        "overlap": bool(scheduler.async_scheduling),
        "seed": model.seed,
        "cudagraph_mode": graphs,
        "cudagraph_capture_sizes": list(compilation.cudagraph_capture_sizes or ()),
    }


def served(number: int, prompt: Sequence[int], found: Any, arrival_s: float) -> RequestOutput:
    """vLLM's output of a request -> the harness's; None: it never came back."""
    if found is None:
        return output(number, prompt, [], arrival_s=arrival_s, begin_s=None, times_s=(),
                      error="vLLM did not hand it back")  # fmt: skip
    (one,), stamps = found.outputs, found.metrics
    ended = one.finish_reason
    return output(
        number, prompt, one.token_ids,
        arrival_s=arrival_s, begin_s=stamps.scheduled_ts, times_s=(),
        first_s=stamps.first_token_ts, last_s=stamps.last_token_ts,
        preemptions=None, cached_tokens=found.num_cached_tokens,
        error=None if ended == "length" else f"vLLM ended it as {ended}",
    )  # fmt: skip
