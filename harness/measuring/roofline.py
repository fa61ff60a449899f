"""Bytes and operations that a step must move and do, from the model's shape.

MBU and MFU need a ceiling measured on the same machine; without one they are null with a reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.comm.types import Kind
from engine.shape import ModelShape


@dataclass(frozen=True, slots=True)
class StepCost:
    """What one step asks of all ranks together. Bytes, and floating-point operations of products
    with weights (matmul) and of attention."""

    weights_bytes: int
    kv_bytes: float
    logits_bytes: float
    matmul_flops: float
    attention_flops: float

    @property
    def bytes(self) -> float:
        return self.weights_bytes + self.kv_bytes + self.logits_bytes

    @property
    def flops(self) -> float:
        return self.matmul_flops + self.attention_flops


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured on this machine, per device: bytes/s read, and matmul operations/s in the dtype."""

    read_bytes_s: float
    matmul_flops_s: float


def layer_weights(shape: ModelShape, tp: int) -> int:
    """Parameters of one decoder layer, of all ranks: norms stand on every rank, K/V heads on
    several where there are fewer than ranks."""
    h, d, i = shape.hidden_size, shape.head_dim, shape.intermediate_size
    q = shape.num_heads * d
    kv = shape.kv_heads_local(tp) * tp * d
    attention = h * (q + 2 * kv) + q * h
    if shape.qkv_bias:
        attention += q + 2 * kv
    if shape.o_bias:
        attention += h
    norms = 2 * h + (2 * d if shape.qk_norm else 0)
    return attention + 3 * h * i + norms * tp


def weights_read(shape: ModelShape, *, tp: int, tokens: int, itemsize: int) -> int:
    """Bytes of weights that a step of `tokens` query tokens reads, of all ranks: every layer, the
    final norm and the LM head once; of an embedding table of its own only the tokens' rows."""
    params = shape.num_layers * layer_weights(shape, tp) + shape.hidden_size * tp
    params += shape.vocab_size * shape.hidden_size  # the LM head, tied or not
    if not shape.tied:
        params += tokens * shape.hidden_size
    return params * itemsize


def step_cost(
    shape: ModelShape,
    *,
    tp: int,
    itemsize: int,
    new: Sequence[int],
    keys: Sequence[int],
    samples: int,
) -> StepCost:
    """Cost of one step.

    Args:
        new: query tokens of each sequence; keys: its positions after the step (those included).
        samples: sequences that sample; each reads a row of logits out, written once.

    K/V of `keys - new` positions is read and of `new` written. Operations: 2 a weight and token
    (embedding rows none, LM head for the sampled rows), attention 4 x query heads x head_dim a
    query and key, causal.
    """
    tokens = sum(new)
    kv_token = shape.kv_bytes_per_token(tp, itemsize) * tp
    matmul = shape.num_layers * (
        shape.hidden_size * (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        + shape.num_heads * shape.head_dim * shape.hidden_size
        + 3 * shape.hidden_size * shape.intermediate_size
    )
    pairs = sum(n * k - n * (n - 1) / 2 for n, k in zip(new, keys, strict=True))
    head = shape.vocab_size * shape.hidden_size
    return StepCost(
        weights_bytes=weights_read(shape, tp=tp, tokens=tokens, itemsize=itemsize),
        kv_bytes=float(kv_token * sum(keys)),
        logits_bytes=float(samples * shape.vocab_size * itemsize),
        matmul_flops=2.0 * tokens * matmul + 2.0 * samples * head,
        attention_flops=4.0 * shape.num_layers * shape.num_heads * shape.head_dim * pairs,
    )


def mean_decode_cost(
    shape: ModelShape, *, tp: int, itemsize: int, prompt_tokens: int, output_tokens: int, batch: int
) -> StepCost | None:
    """Mean over the pure decode steps of a fixed batch, in which token i (2 .. output_tokens) of
    each sequence attends to prompt_tokens + i - 1 positions; None if there are none.

    Costs are linear in the number of keys, so the cost at the mean number is the mean cost; it is
    computed at both ends and averaged, to keep keys whole."""
    if output_tokens < 2:
        return None
    ends = [
        step_cost(
            shape, tp=tp, itemsize=itemsize, new=[1] * batch, keys=[keys] * batch, samples=batch
        )
        for keys in (prompt_tokens + 1, prompt_tokens + output_tokens - 1)
    ]
    return StepCost(
        weights_bytes=ends[0].weights_bytes,
        kv_bytes=(ends[0].kv_bytes + ends[1].kv_bytes) / 2,
        logits_bytes=ends[0].logits_bytes,
        matmul_flops=ends[0].matmul_flops,
        attention_flops=(ends[0].attention_flops + ends[1].attention_flops) / 2,
    )


def utilisation(
    cost: StepCost, step_us: float, tp: int, ceilings: Ceilings | None
) -> tuple[float | None, float | None, str | None]:
    """(MBU, MFU, reason why they are None): against the ceilings of `tp` devices together."""
    if ceilings is None:
        return None, None, "no ceiling of a GPU was measured on this machine"
    seconds = step_us * 1e-6 * tp
    mbu = cost.bytes / (seconds * ceilings.read_bytes_s)
    return mbu, cost.flops / (seconds * ceilings.matmul_flops_s), None


def bus_factor(kind: Kind, world: int) -> float:
    """busbw / algbw, as nccl-tests define it: what a ring's links carry beside the payload."""
    ring = (world - 1) / world
    return {Kind.ALL_REDUCE: 2 * ring, Kind.GATHER: ring, Kind.BROADCAST: 1.0}[kind]
