"""How many pages of K/V a GPU holds beside weights, activations and CUDA graphs."""

from __future__ import annotations

import torch

from engine.config import ResolvedConfig
from engine.errors import ConfigError
from engine.graph_shapes import bucket_sizes, prompt_shapes
from engine.inputs.buffers import BatchBuffers
from engine.kv_cache import KVCache
from engine.models.qwen import Qwen3ForCausalLM
from engine.sampling.stage import PROMPT_ROWS
from engine.sampling.step_sampler import SLICE_ROWS
from engine.scheduling.step import StepPlan
from engine.shape import ModelShape

_GRAPH_BYTES = 16 << 20  # what the driver keeps of one graph's nodes; 0.6B: 350 MB for 20 graphs


@torch.inference_mode()
def pages_that_fit(
    model: Qwen3ForCausalLM, shape: ModelShape, config: ResolvedConfig, buffers: BatchBuffers
) -> int:
    """Runs the largest step once, on a cache that is one dummy page, and divides what is left.

    What other processes hold counts as taken: the budget starts from the memory that is free now,
    with the weights loaded, less the share of the whole that `memory_utilization` leaves alone.

    Raises:
        ConfigError: not one page fits.
    """
    device = next(model.parameters()).device
    kv_cache = KVCache(shape, config.tp, 0, config.page_size, getattr(torch, config.dtype), device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    batch, _ = buffers.fill(StepPlan.dummy(config, config.max_num_batched_tokens, page=0))
    hidden = model(batch, kv_cache)
    model.compute_logits(hidden, batch)
    torch.cuda.current_stream(device).synchronize()
    activations = torch.cuda.max_memory_allocated(device) - before
    del hidden, batch, kv_cache
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    itemsize = getattr(torch, config.dtype).itemsize
    reserved = int(total * (1 - config.memory_utilization))
    reserved += _graph_reserve(config, shape, activations) + _sampling_reserve(
        config, shape, itemsize
    )
    page = KVCache.bytes_per_page(shape, config.tp, config.page_size, itemsize)
    pages = (free - activations - reserved) // page - 1  # one of them is the dummy page
    if pages < 1:
        raise ConfigError(
            f"memory_utilization={config.memory_utilization}: of {total / 2**30:.1f} GiB "
            f"{free / 2**30:.1f} are free, activations take {activations / 2**30:.1f} and "
            f"{reserved / 2**30:.1f} are reserved, which leaves no room for a page; raise it, or "
            f"lower max_num_batched_tokens"
        )
    return pages


def _graph_reserve(config: ResolvedConfig, shape: ModelShape, activations: int) -> int:
    """Bytes kept free for CUDA graphs: the nodes of a clean and an observed one of each shape, and
    of both as pairs where steps decode; the largest decode step's logits as they are gathered and
    as they are sampled in float32; the activations of the largest step with prompts, as its share
    of those of max_num_batched_tokens rows, in the graphs' memory and once more as the allocator
    keeps them from the run before the capture."""
    if config.enforce_eager:
        return 0
    rows = config.graph_prompt_tokens
    prompts = prompt_shapes(rows, config.max_num_seqs, config.max_model_len)
    graphs = 2 * len(bucket_sizes(config.max_num_seqs)) + 2 * len(prompts)
    logits = config.max_num_seqs * shape.vocab_size * 8
    return graphs * _GRAPH_BYTES + logits + 2 * activations * rows // config.max_num_batched_tokens


def _sampling_reserve(config: ResolvedConfig, shape: ModelShape, itemsize: int) -> int:
    """Bytes kept free for what rank 0 makes once requests ask for more than a temperature: of each
    sequence the kept logits, their float32 copy and the penalties' state; 64 bytes a logit (sorted
    values, ids, int64 sums) of a slice of rows; prompt rows' logits, gathered and put together."""
    rows = config.max_num_seqs * (itemsize + 4 + 5) + SLICE_ROWS * 64 + PROMPT_ROWS * 2 * itemsize
    return rows * shape.vocab_size
