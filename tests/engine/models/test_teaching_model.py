"""A model small enough to check by hand: its shapes and shards over two ranks, number by number.

TP = 2, V = 32, H = 8, 4 query heads, 2 K/V heads, D = 2, I = 16, T = 5 packed tokens.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.comm import Collective, Communicator, Kind, Site
from engine.kv_cache import KVCache
from engine.models import Qwen3ForCausalLM
from engine.shape import ModelShape
from engine.weights import load_weights
from tests.support.batches import Rows, build_batch
from tests.support.threads import Recorder, run_ranks

SHAPE = ModelShape(
    model_type="qwen3",
    vocab_size=32,
    hidden_size=8,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=2,
    intermediate_size=16,
    rms_norm_eps=1e-6,
    rope_theta=10_000.0,
    max_position=64,
    tied=False,
    qk_norm=True,
    qkv_bias=False,
    o_bias=False,
    dtype="float32",
    eos_token_ids=(),
)
# Five tokens: prompts of 2, 2 and 1 packed into one step, so three sequences sample.
PROMPTS = ([2, 19], [30, 4], [11])


class Recording:
    """What one rank computed and said while the five tokens went through the model once."""

    def __init__(self, comm: Communicator) -> None:
        self.model = model = Qwen3ForCausalLM(SHAPE, comm, "sdpa", 64, torch.float32, "cpu")
        load_weights(model, "", load_format="dummy", seed=3)
        self.inputs: dict[str, torch.Tensor] = {}
        self.outputs: dict[str, torch.Tensor] = {}
        for name, module in model.named_modules():
            module.register_forward_hook(self._hook(name))
        recorder = Recorder()
        comm.attach([recorder])
        cache = KVCache(SHAPE, comm.world, 4, 4, torch.float32, "cpu")
        batch = build_batch([Rows(ids, 0, [i]) for i, ids in enumerate(PROMPTS)], 4)
        self.hidden = model(batch, cache)
        self.local_logits = model.lm_head.partial(self.hidden, batch.logits_indices)
        self.logits = model.compute_logits(self.hidden, batch)
        self.collectives: list[Collective] = recorder.collectives
        self.cache = cache

    def _hook(self, name: str) -> Any:
        def keep(_: Any, args: tuple[Any, ...], output: Any) -> None:
            if args and isinstance(args[0], torch.Tensor):
                self.inputs[name] = args[0].clone()
            if isinstance(output, torch.Tensor):
                self.outputs[name] = output.clone()

        return keep


@pytest.fixture(scope="module")
def ranks() -> list[Recording]:
    return run_ranks(2, Recording)


@pytest.fixture(scope="module")
def alone() -> Recording:
    return run_ranks(1, Recording)[0]


LAYER = "model.layers.1"


def test_each_rank_owns_half_the_vocabulary(ranks: list[Recording], alone: Recording) -> None:
    """ids [2, 19, 30]: rank 0 holds rows 0..15 and knows E2, rank 1 the others and E19 and E30."""
    table = alone.model.model.embed_tokens.weight
    ids, zero = torch.tensor([2, 19, 30]), torch.zeros(8)
    first, second = (rank.model.model.embed_tokens for rank in ranks)
    assert torch.equal(first.weight, table[:16]) and torch.equal(second.weight, table[16:])
    assert torch.equal(first.partial(ids), torch.stack([table[2], zero, zero]))
    assert torch.equal(second.partial(ids), torch.stack([zero, table[19], table[30]]))
    assert torch.equal(first.partial(ids) + second.partial(ids), table[ids])


def test_every_rank_has_the_whole_embedding(ranks: list[Recording], alone: Recording) -> None:
    for rank in ranks:
        assert rank.outputs["model.embed_tokens"].shape == (5, 8)
        assert torch.equal(rank.outputs["model.embed_tokens"], alone.outputs["model.embed_tokens"])


def test_local_qkv_is_5_by_8_and_holds_this_ranks_heads(
    ranks: list[Recording], alone: Recording
) -> None:
    """4 query heads and 2 K/V heads of width 2: each rank has 2 + 1 + 1 of them."""
    name = f"{LAYER}.self_attn"
    whole = alone.outputs[f"{name}.qkv_proj"].split([8, 4, 4], dim=1)
    for index, rank in enumerate(ranks):
        local = rank.outputs[f"{name}.qkv_proj"]
        assert local.shape == (5, 8)
        attention = rank.model.model.layers[1].self_attn
        x = rank.inputs[f"{name}.qkv_proj"]
        assert x.shape == (5, 8)
        q, k, v = attention.qkv(x)
        assert [tuple(t.shape) for t in (q, k, v)] == [(5, 2, 2), (5, 1, 2), (5, 1, 2)]
        for mine, all_heads in zip((q, k, v), whole, strict=True):
            expected = all_heads.chunk(2, dim=1)[index]
            torch.testing.assert_close(mine.flatten(1), expected, atol=1e-6, rtol=1e-5)


def test_q_and_k_are_normed_and_rotated_and_v_is_not(ranks: list[Recording]) -> None:
    """V reaches the cache as projected; K's pairs keep the length that the norm gave them."""
    for rank in ranks:
        name = f"{LAYER}.self_attn"
        k_cache, v_cache = rank.cache.layers[1]
        pages, offsets = torch.tensor([0, 0, 1, 1, 2]), torch.tensor([0, 1, 0, 1, 0])
        projected = rank.outputs[f"{name}.qkv_proj"]
        assert torch.equal(v_cache[pages, offsets], projected[:, 6:8].unflatten(1, (1, 2)))
        normed, stored = rank.outputs[f"{name}.k_norm"], k_cache[pages, offsets]
        torch.testing.assert_close(stored.norm(dim=-1), normed.norm(dim=-1))
        at_zero = offsets == 0
        torch.testing.assert_close(stored[at_zero], normed[at_zero])
        assert not torch.allclose(stored[~at_zero], normed[~at_zero])


def test_gate_up_is_5_by_16_and_the_activation_5_by_8(
    ranks: list[Recording], alone: Recording
) -> None:
    gate, up = alone.outputs[f"{LAYER}.mlp.gate_up_proj"].split([16, 16], dim=1)
    for index, rank in enumerate(ranks):
        local = rank.outputs[f"{LAYER}.mlp.gate_up_proj"]
        assert local.shape == (5, 16)
        expected = torch.cat([gate.chunk(2, 1)[index], up.chunk(2, 1)[index]], dim=1)
        torch.testing.assert_close(local, expected, atol=1e-6, rtol=1e-5)
        assert rank.outputs[f"{LAYER}.mlp.act"].shape == (5, 8)
        assert rank.outputs[f"{LAYER}.mlp"].shape == (5, 8)
    # Each rank's MLP gives its summand; the next layer's norm sums them.
    summed = ranks[0].outputs[f"{LAYER}.mlp"] + ranks[1].outputs[f"{LAYER}.mlp"]
    torch.testing.assert_close(summed, alone.outputs[f"{LAYER}.mlp"], atol=1e-6, rtol=1e-5)


def test_hidden_states_are_whole_on_every_rank(ranks: list[Recording], alone: Recording) -> None:
    for rank in ranks:
        torch.testing.assert_close(rank.hidden, alone.hidden, atol=1e-5, rtol=1e-5)


def test_local_logits_are_3_by_16_and_rank_0_alone_gets_3_by_32(
    ranks: list[Recording], alone: Recording
) -> None:
    first, second = ranks
    assert first.local_logits.shape == second.local_logits.shape == (3, 16)
    assert first.logits is not None and alone.logits is not None
    assert first.logits.shape == (3, 32) and second.logits is None
    torch.testing.assert_close(first.logits, alone.logits, atol=1e-6, rtol=1e-5)
    joined = torch.cat([first.local_logits, second.local_logits], dim=1)
    assert torch.equal(first.logits, joined)


def test_the_ranks_meet_where_the_mathematics_needs_it(
    ranks: list[Recording], alone: Recording
) -> None:
    """One all-reduce of [5, 8] after the embedding and two a layer; one gather of [3, 32]."""
    layer = [Site.ATTN_O_PROJ, Site.MLP_DOWN_PROJ]
    expected = [(Kind.ALL_REDUCE, site, 5 * 8 * 4) for site in [Site.EMBED, *layer, *layer]]
    expected.append((Kind.GATHER, Site.LM_HEAD, 3 * 32 * 4))
    for rank in ranks:
        assert [(c.kind, c.site, c.bytes) for c in rank.collectives] == expected
    assert alone.collectives == []
