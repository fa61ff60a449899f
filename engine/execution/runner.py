"""One rank: model, K/V cache, batch tensors, execution and sampling."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.comm.base import Communicator
from engine.comm.types import StepInfo
from engine.config import ResolvedConfig
from engine.execution import forward
from engine.execution.graphs import Capture, StepGraphs
from engine.execution.launched import Launched
from engine.execution.memory import readings
from engine.execution.prebuild import prebuilding
from engine.execution.sizing import pages_that_fit
from engine.execution.steplog import StepLog
from engine.execution.warmup import warmup_steps
from engine.graph_shapes import GraphShape
from engine.inputs.batch import ForwardBatch
from engine.inputs.buffers import BatchBuffers, SamplingRows
from engine.inputs.readback import Readback
from engine.kernels import Kernels, triton_builds
from engine.kv_cache import KVCache
from engine.models.qwen import Qwen3ForCausalLM
from engine.sampling.plan import SamplingPlan
from engine.sampling.stage import SamplingStage
from engine.scheduling.step import StepPlan
from engine.shape import ModelShape
from engine.weights import load_weights


class Runner:
    """Runs step plans on one rank. `launch` enqueues a step, `collect` reads its ids back.

    Args:
        config: resolved (no `auto` left); `num_pages` may be None on a GPU.
        agree: maps this rank's page count to the smallest of all ranks, so that every page id that
            the scheduler hands out exists everywhere.

    Attributes:
        startup: seconds of load (and building own kernels), compile, capture, warm-up; None:
            the phase did not happen.
        effective: the configuration that runs.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        shape: ModelShape,
        comm: Communicator,
        agree: Callable[[int], int] = lambda pages: pages,
    ) -> None:
        self.comm = comm
        self.shape = shape
        on_gpu = config.device == "cuda"
        # The current GPU: who starts a rank chooses it, and its number alone does not say which.
        self.device = torch.device(f"cuda:{torch.cuda.current_device()}" if on_gpu else "cpu")
        self._use_cache_dir(config.cache_dir)
        self._counted_before = forward.compile_counters()
        begin = time.perf_counter()
        with prebuilding(config, shape, comm.rank) if on_gpu else nullcontext():
            self.model = Qwen3ForCausalLM(
                shape,
                comm,
                config.attention,
                config.max_model_len,
                getattr(torch, config.dtype),
                self.device,
                Kernels(config.fused, config.linear),
            )
            load_weights(self.model, config.model, load_format=config.load_format, seed=config.seed)
        num_pages = agree(
            config.num_pages
            or pages_that_fit(self.model, shape, config, self._new_buffers(config, dummy_page=0))
        )
        self.config = replace(config, num_pages=num_pages)
        self.kv_cache = self._cache(self.config, num_pages)
        loaded = time.perf_counter()
        self._buffers = self._new_buffers(self.config, num_pages)
        self._sampling = SamplingStage(
            comm,
            self._buffers.last_tokens,
            max_num_seqs=config.max_num_seqs,
            vocab_size=shape.vocab_size,
        )
        self._readback = Readback(config.max_num_seqs, self.device)
        self._steps = StepLog()
        self._execution = forward.build(self.model, self.kv_cache, config.compile)
        first_runs = self._warmup()
        warmed = time.perf_counter()
        self._graphs = None if config.enforce_eager else self._capture()
        captured = time.perf_counter()
        self.startup: dict[str, float | None] = {
            "load_s": loaded - begin,
            "compile_s": first_runs if config.compile != "off" else None,
            "capture_s": captured - warmed if self._graphs is not None else None,
            "warmup_s": first_runs if config.compile == "off" else None,
        }
        mode = self._graphs.mode if self._graphs is not None else self._execution.mode
        self.effective: dict[str, Any] = {**asdict(self.config), "mode": mode}

    # -- a step -----------------------------------------------------------------------------------

    @torch.inference_mode()
    def launch(self, plan: StepPlan, sampling: SamplingPlan | None = None) -> Launched:
        """Enqueues one step: forward, and where sequences sample, logits to rank 0, sampling there,
        and the ids to every rank. `sampling` is rank 0's alone."""
        begin = time.perf_counter_ns()
        graphs = self._graphs
        shape = None if graphs is None else graphs.shape_of(plan)
        info = StepInfo(
            plan.step,
            plan.phase,
            plan.num_seqs,
            plan.num_tokens,
            bucket=plan.num_tokens if shape is None else shape.rows,
            samples=int(plan.samples.sum()),
            mode=self._execution.mode if graphs is None or shape is None else graphs.mode,
        )
        self.comm.step_begin(info)
        if graphs is None or shape is None:
            launched = self._run(plan, sampling)
        else:
            launched = self._replay(graphs, shape, plan, sampling)
        self.comm.step_end(info)
        if self.comm.rank == 0:
            launched = launched.on_its_way(self._readback)
        self._steps.append(info, begin, time.perf_counter_ns())
        return launched

    def _run(self, plan: StepPlan, sampling: SamplingPlan | None) -> Launched:
        batch, rows = self._buffers.fill(plan)
        hidden = self._execution.run(batch)
        prompt = self._sampling.prompt_logprobs(self.model.lm_head, hidden, plan, sampling)
        if not len(rows.slots):
            return Launched(None, sampling, prompt_logprobs=prompt)
        logits = self.model.compute_logits(hidden, batch)
        ids, logprobs = self._sampling(logits, rows, None if plan.plain else sampling)
        return Launched(ids, sampling, logprobs, prompt)

    def _replay(
        self,
        graphs: StepGraphs,
        shape: GraphShape,
        plan: StepPlan,
        sampling: SamplingPlan | None,
    ) -> Launched:
        """A step that is all plain is one replay; else rank 0 samples between two."""
        count, logprobs = int(plan.samples.sum()), None
        _, known = self._buffers.load(plan, shape.rows, shape.prompt_seqs)
        if shape.prompts and known:  # a decode step's graph fetches them itself
            self._buffers.fetch_known(self._buffers.input_ids(shape.rows), known)

        def between() -> None:
            nonlocal logprobs
            if sampling is not None:
                rows = self._buffers.rows(count, not plan.temperatures.any())
                logprobs = self._sampling.sample(self._sampling.kept(count), rows, sampling)

        graphs.replay(shape, None if plan.plain else between)
        return Launched(self._sampling.ids(count) if count else None, sampling, logprobs)

    def _forward(self, batch: ForwardBatch, rows: SamplingRows) -> torch.Tensor:
        """A step that is all plain, on inputs that are laid out -> ids [N]."""
        logits = self.model.compute_logits(self._execution.run(batch), batch)
        return self._sampling(logits, rows, None)[0]

    def _forward_to_logits(self, batch: ForwardBatch, rows: SamplingRows) -> None:
        """The front of a step that is not."""
        self._sampling.keep(self.model.compute_logits(self._execution.run(batch), batch))

    def collect(self, launched: Launched) -> list[int]:
        """Waits for the step and returns its sampled ids in the order of the plan's rows."""
        assert launched.pending is not None, "rank 0 alone collects"
        return launched.pending.wait()

    def record_wall(self, step: int, begin_ns: int, end_ns: int) -> None:
        """Adds the plan-to-collect time of a step to the step log (rank 0)."""
        self._steps.set_wall(step, begin_ns, end_ns)

    # -- what may be asked between steps ----------------------------------------------------------

    def drain_steps(self) -> np.ndarray:
        """The steps since the last call, as rows of steplog.STEP_DTYPE."""
        return self._steps.drain()

    def counters(self) -> dict[str, int]:
        """Ever-growing counts of this engine's rank."""
        compiled = {
            name: count - self._counted_before[name]
            for name, count in forward.compile_counters().items()
        }
        captures = 0 if self._graphs is None else self._graphs.num_captures
        return {**compiled, "captures": captures, "triton_builds": triton_builds()}

    def memory(self) -> dict[str, int | None]:
        """As memory.readings."""
        pool = None if self._graphs is None else self._graphs.pool_bytes
        return readings(self.model, self.kv_cache, pool, self.device)

    def captures(self) -> list[Capture]:
        """What capturing each bucket at start-up cost, in the order of capture."""
        return [] if self._graphs is None else list(self._graphs.captures)

    def synchronize(self) -> None:
        """Waits for everything this rank has enqueued."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def forget_observed_graphs(self) -> None:
        """Drops graphs that were captured with observers inside."""
        if self._graphs is not None:
            self._graphs.forget_observed()

    def close(self) -> None:
        """Frees model and cache before the communicator goes; repeatable."""
        if hasattr(self, "model"):
            if self._graphs is not None:
                self._graphs.close()
            self._execution.close()
            del self.model, self.kv_cache, self._execution, self._buffers, self._graphs
            del self._sampling
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        self.comm.close()

    # -- start-up ---------------------------------------------------------------------------------

    def _use_cache_dir(self, cache_dir: str | None) -> None:
        """One compile cache a rank and GPU: in a shared one ranks race, and load code that was
        built for another's GPU."""
        if cache_dir is None:
            return
        gpu = "" if self.device.index is None else f"-gpu{self.device.index}"
        root = Path(cache_dir) / f"rank{self.comm.rank}{gpu}"
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(root / "inductor")
        os.environ["TRITON_CACHE_DIR"] = str(root / "triton")

    def _cache(self, config: ResolvedConfig, num_pages: int) -> KVCache:
        dtype = getattr(torch, config.dtype)
        return KVCache(self.shape, self.comm.world, num_pages, config.page_size, dtype, self.device)

    def _new_buffers(self, config: ResolvedConfig, dummy_page: int) -> BatchBuffers:
        return BatchBuffers(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            page_size=config.page_size,
            dummy_page=dummy_page,
            device=self.device,
        )

    @torch.inference_mode()
    def _capture(self) -> StepGraphs:
        return StepGraphs(
            self._forward,
            self._forward_to_logits,
            self._sampling.hand_out,
            self._buffers,
            self.comm,
            max_num_seqs=self.config.max_num_seqs,
            max_model_len=self.config.max_model_len,
            prompt_tokens=self.config.graph_prompt_tokens,
            mode=self._execution.mode,
        )

    @torch.inference_mode()
    def _warmup(self) -> float:
        """Runs each kind of forward once, on the dummy page; returns seconds."""
        begin = time.perf_counter()
        for batch, rows in warmup_steps(self.config, self._buffers, self._execution.warmup_sizes):
            self._forward(batch, rows)
            self.synchronize()
        self._sampling.warm_up(rows)
        self._execution.warmed_up()
        return time.perf_counter() - begin
