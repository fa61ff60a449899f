"""Steps that a rank runs before it serves, so that no kernel is built later."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from engine.config import ResolvedConfig
from engine.graph_shapes import bucket_sizes
from engine.inputs.batch import ForwardBatch
from engine.inputs.buffers import BatchBuffers, SamplingRows
from engine.kernels.linear import ROWS_BUILT
from engine.scheduling.step import StepPlan


def warmup_steps(
    config: ResolvedConfig, buffers: BatchBuffers, sizes: Sequence[int]
) -> Iterator[tuple[ForwardBatch, SamplingRows]]:
    """Prompts of so many tokens, and of as many as own products have kernels for; on a GPU without
    graphs, whose capture runs the like, decode steps too: attention has other kernels for them,
    which differ by the number of rows (triton_paged.num_splits).

    All on the dummy page. A step's inputs are laid out anew when the next one is asked for: wait
    for the device before that.
    """
    assert config.num_pages is not None
    own = ROWS_BUILT if config.linear == "triton" else ()
    for tokens in (*sizes, *own):
        yield buffers.fill(StepPlan.dummy(config, tokens, page=config.num_pages))
    if config.enforce_eager and config.device == "cuda":
        for rows in bucket_sizes(config.max_num_seqs):
            buffers.fill_padding(rows)
            yield buffers.views(rows, rows, (rows, 1, 1, rows), all_greedy=False)
