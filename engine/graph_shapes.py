"""Which steps have a CUDA graph: the rows and sequences that each graph takes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from engine.comm.types import Phase
from engine.scheduling.step import StepPlan
from engine.shape import ModelShape

PROMPT_ROWS = (32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
PROMPT_SEQS = 64
PROMPT_SLOTS = 1 << 17
"""Most sequences of a step with prompts, and of them times rows: attention is launched for as many
sequences of as many rows as a graph takes. Those that a step does not fill end at once, which costs
too, as do their logits."""
LAUNCH_S = 450e-6
PROMPT_FLOPS = 400e12
"""What launching a layer of Qwen3 takes the host, and what its products reach with some hundred
rows, on the machine of the published figures."""


class GraphShape(NamedTuple):
    """What one graph was captured for.

    Attributes:
        rows: of the forward; seqs: that sample. A decode step has as many of both.
        prompts: whether the step may hold prompt chunks (and sequences that decode besides). Its
            attention takes one sequence more, to which the rows of padding belong.
    """

    rows: int
    seqs: int
    prompts: bool

    @property
    def prompt_seqs(self) -> int | None:
        """`seqs` as BatchBuffers wants them of a step with prompts, None of one that decodes."""
        return self.seqs if self.prompts else None


def bucket_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Rows of decode steps that graphs are captured for: 1, 2, 4, 8, every 16th, and always
    max_num_seqs itself, so that no batch size is left without a graph."""
    sizes = {1, 2, 4, 8, *range(16, max_num_seqs + 1, 16), max_num_seqs}
    return tuple(sorted(size for size in sizes if size <= max_num_seqs))


def prompt_limit(shape: ModelShape, tp: int, max_num_batched_tokens: int) -> int:
    """Rows up to which a step with prompts gains from a graph: those that a GPU computes in the
    time that the host takes to launch them, LAUNCH_S * PROMPT_FLOPS / FLOPs of a row in a layer's
    products, up to the next of PROMPT_ROWS. Beyond, a graph's padding would cost more than it
    saves. Qwen3 0.6B: 4,096, 8B: 512, at tp=2 1,024."""
    heads = shape.num_heads + 2 * shape.num_kv_heads
    attention = shape.hidden_size * shape.head_dim * (heads + shape.num_heads)
    weights = attention + 3 * shape.hidden_size * shape.intermediate_size
    enough = LAUNCH_S * PROMPT_FLOPS / (2 * weights / tp)
    found = next((rows for rows in PROMPT_ROWS if rows >= enough), PROMPT_ROWS[-1])
    return min(found, max_num_batched_tokens)


def prompt_shapes(limit: int, max_num_seqs: int, max_model_len: int) -> tuple[GraphShape, ...]:
    """Shapes of steps with prompts of up to `limit` rows (0: none), smallest first. The last has
    `limit` rows, or as many as max_num_seqs sequences can fill. Without those that could never be
    full."""
    limit = min(limit, max_num_seqs * max_model_len)
    sizes = sorted({*(rows for rows in PROMPT_ROWS if rows < limit), limit} - {0})
    found = [
        GraphShape(rows, min(PROMPT_SEQS, max_num_seqs, rows, max(1, PROMPT_SLOTS // rows)), True)
        for rows in sizes
    ]
    return tuple(one for one in found if one.rows <= one.seqs * max_model_len)


def decode_shapes(max_num_seqs: int) -> tuple[GraphShape, ...]:
    """Shapes of decode steps, smallest first."""
    return tuple(GraphShape(size, size, False) for size in bucket_sizes(max_num_seqs))


def shape_of(plan: StepPlan, shapes: Iterable[GraphShape], max_model_len: int) -> GraphShape | None:
    """The first of `shapes`, smallest first, that takes the step; None: it is launched. Rows of
    padding beside prompts are sequences too, of max_model_len tokens at most; what the sampling of
    such a step asks for besides temperature and seed is not in its graph."""
    decodes = plan.phase is Phase.DECODE
    if not decodes and not plan.says_all:
        return None
    for one in shapes:
        if one.prompts == decodes or one.rows < plan.num_tokens or one.seqs < plan.num_seqs:
            continue
        room = (one.seqs + 1 - plan.num_seqs) * max_model_len
        return one if decodes or one.rows - plan.num_tokens <= room else None
    return None
