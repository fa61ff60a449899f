"""Builds own kernels in threads, while a rank's weights are loaded.

Without it each is built where it is first launched, one after the other: with an empty cache of
Triton's, 8 s of a start of 19 s on an H200's host. Once a rank's kernels are in that cache a file
beside them says so, and they are loaded as they are launched: finding out which they are would cost
more (torch's meta functions import sympy).
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from engine.comm.base import AddNorm
from engine.comm.fused import MAX_ROWS
from engine.comm.solo import SoloCommunicator
from engine.comm.types import Site
from engine.config import ResolvedConfig
from engine.execution.warmup import warmup_steps
from engine.graph_shapes import bucket_sizes
from engine.inputs.batch import ForwardBatch
from engine.inputs.buffers import BatchBuffers, SamplingRows
from engine.kernels import Kernels
from engine.kv_cache import KVCache
from engine.models.qwen import Qwen3ForCausalLM
from engine.sampling.stage import SamplingStage
from engine.shape import ModelShape

logger = logging.getLogger(__name__)

_META = torch.device("meta")
_LAYERS = 2  # the first has no residual to add
_DECODE, _PREFILL = ("triton", "flash2_triton", "flash4"), ("triton",)
"""Attention backends whose decoding, and whose prompts, take own kernels."""
_Tensors = TypeVar("_Tensors", ForwardBatch, SamplingRows)


class _Rank(SoloCommunicator):
    """A rank of `world` whose collectives do nothing. It is in no registry: no operator asks."""

    def __init__(self, rank: int, config: ResolvedConfig) -> None:
        self.rank, self.world = rank, config.tp
        self._fused = config.comm == "symm_fused"

    def gather(self, x: torch.Tensor, site: Site) -> torch.Tensor | None:
        return x.new_empty(len(x), self.world * x.shape[1]) if self.rank == 0 else None

    def reduce_add_norm(
        self, partial: torch.Tensor, residual: torch.Tensor, norm: AddNorm, site: Site
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """With symm_fused in both ways: how many rows a step has decides."""
        if self._fused and len(residual) <= MAX_ROWS:
            from engine.kernels.reduce_triton import reduce_add_norm_triton

            parts = residual.new_empty(self.world, dtype=torch.int64)
            epochs = residual.new_empty(MAX_ROWS, dtype=torch.int32)
            reduce_add_norm_triton(parts, parts, epochs, residual, norm.weight, norm.eps, self.rank)
        return super().reduce_add_norm(partial, residual, norm, site)


@contextmanager
def prebuilding(config: ResolvedConfig, shape: ModelShape, rank: int) -> Iterator[None]:
    """Own kernels of one rank on the current GPU, from entering on; leaving waits for them.

    What fails is logged and left to the launch that needs it.
    """
    mark = _mark_path(config, shape, rank)
    if os.path.exists(mark):  # False, too, where it may not be asked
        yield
        return
    enter = partial(torch.cuda.set_device, torch.cuda.current_device())
    threads = min(8, config.threads_per_rank)
    pool = ThreadPoolExecutor(threads, "prebuild", initializer=enter)
    begun = pool.submit(
        lambda: {pool.submit(build): build for build in first_launches(config, shape, rank)}
    )
    try:
        yield
        try:
            builds = begun.result()
            wait(builds)
            # What failed is tried alone: CPython 3.11 counts the depth of syntax trees for all
            # threads together, so that one of several that parse at once may fail (SystemError).
            for build in [build for done, build in builds.items() if done.exception()]:
                build()
            _leave_mark(mark)
        except Exception:
            logger.warning("kernels are built as they are launched", exc_info=True)
    finally:  # after an error or Ctrl-C what has not begun would run before the process ends
        pool.shutdown(wait=False, cancel_futures=True)


def _mark_path(config: ResolvedConfig, shape: ModelShape, rank: int) -> Path:
    """The file that says that Triton's cache holds a rank's kernels, named after all that decides
    which they are."""
    import triton

    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    facts = (config, shape, rank, torch.cuda.get_device_capability(), triton.__version__, files)
    digest = hashlib.sha256(repr(facts).encode())
    for file in files:
        digest.update(file.read_bytes())
    return Path(triton.knobs.cache.dir) / f"rangefinder-{digest.hexdigest()[:32]}"


def _leave_mark(file: Path) -> None:
    """For the next start. There is no folder yet where a rank has no kernels of its own."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    except OSError as error:
        logger.warning("%s: %s; every start looks for its kernels", file, error.strerror)


@torch.inference_mode()
def first_launches(
    config: ResolvedConfig, shape: ModelShape, rank: int
) -> list[Callable[[], None]]:
    """What builds each own kernel that a rank will launch for the first time.

    The rank's own code says which: two of its layers run all kinds of steps on meta tensors, whose
    launches are noted and not made.
    """
    from engine.kernels import decode_triton, prefill_triton
    from engine.kernels.launch import noting

    foreign = set()
    if config.attention not in _DECODE:
        foreign |= {decode_triton._decode, decode_triton._combine}
    if config.attention not in _PREFILL:
        foreign.add(prefill_triton._prefill)
    kinds = [Kernels(config.fused, config.linear)]
    if config.compile != "off" and config.fused != "none":
        # Not compiled are the step that measures memory, and behind compiled layers the last norm.
        plain = config.num_pages is None or config.compile == "layer"
        kinds = [*kinds[:plain], Kernels("none", config.linear)]
    with noting() as noted:
        for kernels in kinds:
            _run_on_meta(config, replace(shape, num_layers=_LAYERS), _Rank(rank, config), kernels)
    return [build for (kernel, *_), build in noted.items() if kernel not in foreign]


def _run_on_meta(config: ResolvedConfig, shape: ModelShape, comm: _Rank, kernels: Kernels) -> None:
    dtype = getattr(torch, config.dtype)
    # One rotary row: it is computed on the CPU, and no kernel depends on how many there are.
    model = Qwen3ForCausalLM(shape, comm, "triton", 1, dtype, _META, kernels)
    kv_cache = KVCache(shape, config.tp, 1, config.page_size, dtype, _META)
    # On the CPU, since meta tensors cannot be filled.
    buffers = BatchBuffers(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        page_size=config.page_size,
        dummy_page=1,
        device=torch.device("cpu"),
    )
    sampling = SamplingStage(
        comm,
        buffers.last_tokens.to(_META),
        max_num_seqs=config.max_num_seqs,
        vocab_size=shape.vocab_size,
    )
    for batch, rows in _steps(replace(config, num_pages=1), buffers):
        there = _on_meta(batch)
        logits = model.compute_logits(model(there, kv_cache), there)
        sampling(logits, _on_meta(rows), None)
        sampling.warm_up(_on_meta(rows))


def _steps(
    config: ResolvedConfig, buffers: BatchBuffers
) -> Iterator[tuple[ForwardBatch, SamplingRows]]:
    """Those of warming up and of capturing."""
    yield from warmup_steps(config, buffers, (1, 2))
    for rows in bucket_sizes(config.max_num_seqs):
        yield buffers.views(rows, rows, (rows, 1, 1, rows), all_greedy=False)


def _on_meta(tensors: _Tensors) -> _Tensors:
    """All but host_meta, which is read on the host."""
    values = {f.name: getattr(tensors, f.name) for f in fields(tensors) if f.name != "host_meta"}
    moved: dict[str, Any] = {
        name: value.to(_META) for name, value in values.items() if isinstance(value, torch.Tensor)
    }
    return replace(tensors, **moved)
