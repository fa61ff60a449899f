from __future__ import annotations

from pathlib import Path

import pytest

from engine.shape import ModelShape
from harness.machine.models import resolve_model
from harness.measuring import roofline
from tests.support.fake_backend import SHAPE


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setenv("RANGEFINDER_CACHE", str(tmp_path))

    def shape(name: str) -> ModelShape:
        return ModelShape.from_hf(
            resolve_model({"name": name, "path": None, "load_format": "dummy"})
        )

    return shape


@pytest.mark.parametrize(
    ("name", "gigabytes", "digits"),
    [("0.6b", 1.19, 2), ("1.7b", 3.44, 2), ("4b", 8.0, 1), ("8b", 15.14, 2)],
)
def test_weights_that_a_decode_step_reads(
    published: object, name: str, gigabytes: float, digits: int
) -> None:
    """The published table: the untied embedding of 8B is not read, the tied one is, as LM head."""
    shape = published(f"qwen3-{name}")  # type: ignore[operator]
    read = roofline.weights_read(shape, tp=1, tokens=1, itemsize=2)
    assert round(read / 1e9, digits) == gigabytes


def test_every_weight_of_a_real_model_is_counted_once(tmp_path: Path) -> None:
    """Against the parameters of transformers' own model, tied and untied."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    for tied in (True, False):
        config = Qwen3Config(
            vocab_size=96, hidden_size=32, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, intermediate_size=48, attention_bias=not tied,
            tie_word_embeddings=tied, max_position_embeddings=64,
        )  # fmt: skip
        folder = tmp_path / str(tied)
        model = Qwen3ForCausalLM(config)
        model.save_pretrained(folder)
        total = sum(p.numel() for p in model.parameters())
        embedding = 0 if tied else 96 * 32 - 5 * 32  # all but the rows of five tokens
        read = roofline.weights_read(ModelShape.from_hf(folder), tp=1, tokens=5, itemsize=4)
        assert read == 4 * (total - embedding)


def test_kv_logits_and_flops_by_hand() -> None:
    """SHAPE: 2 layers, H 8, 4 query and 2 KV heads of 4, I 16, V 64; float32."""
    cost = roofline.step_cost(SHAPE, tp=1, itemsize=4, new=[3, 1], keys=[3, 10], samples=2)
    kv_token = 2 * 2 * 2 * 4 * 4  # K and V, layers, heads, head_dim, bytes
    assert cost.kv_bytes == kv_token * 13
    assert cost.logits_bytes == 2 * 64 * 4
    layer = 8 * (16 + 8 + 8) + 16 * 8 + 3 * 8 * 16
    pairs = (1 + 2 + 3) + 10  # causal
    assert cost.matmul_flops == 2 * 4 * 2 * layer + 2 * 2 * 64 * 8
    assert cost.attention_flops == 4 * 2 * 4 * 4 * pairs
    assert cost.flops == cost.matmul_flops + cost.attention_flops
    assert cost.bytes == cost.weights_bytes + cost.kv_bytes + cost.logits_bytes


def test_ranks_share_weights_but_repeat_norms_and_scarce_kv_heads() -> None:
    one, two, four = (roofline.weights_read(SHAPE, tp=tp, tokens=1, itemsize=1) for tp in (1, 2, 4))
    norms = 2 * (2 * 8 + 2 * 4) + 8
    assert two - one == norms
    kv = 2 * 2 * 8 * 2 * 4  # layers, K and V, H, heads, head_dim: 2 heads on 4 ranks
    assert four - one == 3 * norms + kv


def test_mean_decode_cost_is_the_mean_over_the_steps() -> None:
    mean = roofline.mean_decode_cost(
        SHAPE, tp=2, itemsize=4, prompt_tokens=7, output_tokens=6, batch=3
    )
    steps = [
        roofline.step_cost(SHAPE, tp=2, itemsize=4, new=[1] * 3, keys=[7 + i] * 3, samples=3)
        for i in range(1, 6)
    ]
    assert mean is not None
    assert mean.bytes == pytest.approx(sum(s.bytes for s in steps) / 5)
    assert mean.flops == pytest.approx(sum(s.flops for s in steps) / 5)
    assert roofline.mean_decode_cost(
        SHAPE, tp=1, itemsize=4, prompt_tokens=7, output_tokens=1, batch=3
    ) is None  # fmt: skip


def test_utilisation_needs_a_measured_ceiling() -> None:
    cost = roofline.StepCost(4_000, 0, 0, matmul_flops=9e5, attention_flops=1e5)
    assert roofline.utilisation(cost, 100.0, 2, None) == (
        None, None, "no ceiling of a GPU was measured on this machine"
    )  # fmt: skip
    ceilings = roofline.Ceilings(read_bytes_s=1e8, matmul_flops_s=1e11)
    mbu, mfu, reason = roofline.utilisation(cost, 100.0, 2, ceilings)
    assert (mbu, mfu, reason) == (pytest.approx(0.2), pytest.approx(0.05), None)
