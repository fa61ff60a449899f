"""ModelShape against transformers' reading of the same config, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.comm import Kind, Site
from engine.errors import ConfigError
from engine.shape import ModelShape
from tests.support.checkpoints import Checkpoints
from tests.support.configs import ABSENT, QWEN25_05B, read

DEFAULT = {"rope_type": "default"}


def test_published_config(tmp_path: Path) -> None:
    generation = {"eos_token_id": [151645, 151643], "temperature": 0.6}
    assert read(tmp_path, generation) == ModelShape(
        model_type="qwen3",
        vocab_size=151936,
        hidden_size=4096,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=12288,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        max_position=40960,
        tied=False,
        qk_norm=True,
        qkv_bias=False,
        o_bias=False,
        dtype="bfloat16",
        eos_token_ids=(151645, 151643),
    )


def test_published_qwen2_config(tmp_path: Path) -> None:
    """Biases and norms are its architecture's, not the config's; a window that is not used is not
    in the way."""
    assert QWEN25_05B["sliding_window"] and not QWEN25_05B["use_sliding_window"]
    assert read(tmp_path, base=QWEN25_05B) == ModelShape(
        model_type="qwen2",
        vocab_size=151936,
        hidden_size=896,
        num_layers=24,
        num_heads=14,
        num_kv_heads=2,
        head_dim=64,
        intermediate_size=4864,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        max_position=32768,
        tied=True,
        qk_norm=False,
        qkv_bias=True,
        o_bias=False,
        dtype="bfloat16",
        eos_token_ids=(151645,),
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tied": True, "attention_bias": True, "rope_theta": 5e6, "dtype": "bfloat16"},
        {"model_type": "qwen2", "hidden_size": 32, "head_dim": 8},
    ],
)
def test_reads_what_transformers_reads(checkpoints: Checkpoints, changes: dict[str, Any]) -> None:
    import transformers

    path = checkpoints(**changes)
    shape, config = ModelShape.from_hf(path), transformers.AutoConfig.from_pretrained(path)
    is_qwen3 = config.model_type == "qwen3"
    rope = getattr(config, "rope_parameters", None)  # transformers 5; 4 has config.rope_theta
    assert shape == ModelShape(
        model_type=config.model_type,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim if is_qwen3 else config.hidden_size // config.num_attention_heads,
        intermediate_size=config.intermediate_size,
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=rope["rope_theta"] if rope else config.rope_theta,
        max_position=config.max_position_embeddings,
        tied=config.tie_word_embeddings,
        qk_norm=is_qwen3,
        qkv_bias=config.attention_bias if is_qwen3 else True,
        o_bias=config.attention_bias if is_qwen3 else False,
        dtype=str(config.dtype).removeprefix("torch."),
        eos_token_ids=(config.eos_token_id,),
    )


@pytest.mark.parametrize(
    ("changes", "theta"),
    [
        ({"rope_theta": 5e6}, 5e6),
        (
            {"rope_theta": ABSENT, "rope_parameters": {**DEFAULT, "rope_theta": 5e6}},
            5e6,
        ),
        ({"rope_theta": ABSENT, "rope_parameters": {"rope_theta": 1e4}}, 1e4),
        ({"rope_parameters": {**DEFAULT, "rope_theta": 1e6}}, 1e6),
        ({"rope_scaling": {"type": "default"}}, 1e6),
    ],
)
def test_rope_theta_of_old_and_new_configs(
    tmp_path: Path, changes: dict[str, Any], theta: float
) -> None:
    assert read(tmp_path, **changes).rope_theta == theta


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope_theta": ABSENT}, "no rope_theta"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        (
            {"rope_parameters": {**DEFAULT, "rope_theta": 5e6}},
            "different rotary bases",
        ),
        (
            {"rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor=0.5",
        ),
        ({"use_sliding_window": True}, "use_sliding_window=true: sliding-window attention"),
        ({"base": QWEN25_05B, "use_sliding_window": True}, "use_sliding_window=true"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"model_type": "llama"}, "llama"),
        ({"torch_dtype": "float64"}, "float64"),
        ({"head_dim": ABSENT}, "head_dim"),
        ({"head_dim": 127}, "head_dim=127 .* even"),
        ({"hidden_size": ABSENT}, "hidden_size"),
        ({"num_key_value_heads": None}, "num_key_value_heads"),
    ],
)
def test_refuses_by_name(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read(tmp_path, **changes)


def test_refuses_a_folder_without_a_readable_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        ModelShape.from_hf(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        ModelShape.from_hf(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="no JSON object"):
        ModelShape.from_hf(tmp_path)


def test_dtype_and_eos_are_found_in_either_place(tmp_path: Path) -> None:
    assert read(tmp_path, torch_dtype=ABSENT, dtype="float16").dtype == "float16"
    assert read(tmp_path, torch_dtype=ABSENT).dtype == "float32"
    assert read(tmp_path, eos_token_id=ABSENT).eos_token_ids == ()
    assert read(tmp_path, {"eos_token_id": 7}, eos_token_id=[1, 2]).eos_token_ids == (1, 2, 7)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "intermediate", "legal"),
    [
        (16, 8, 3072, [1, 2, 4, 8, 16]),  # 0.6B; 16 holds each KV head on two ranks
        (40, 8, 17408, [1, 2, 4, 8]),  # 14B; 5, 10, 20 do not fit 8 KV heads, 40 not the MLP
        (64, 8, 25600, [1, 2, 4, 8, 16, 32, 64]),  # 32B
        (14, 2, 4864, [1, 2]),  # Qwen2.5-0.5B: 14 heads, but 4864 is not divisible by 7
    ],
)
def test_legal_tp(
    tmp_path: Path, heads: int, kv_heads: int, intermediate: int, legal: list[int]
) -> None:
    shape = read(
        tmp_path,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=intermediate,
    )
    assert shape.legal_tp() == legal
    for tp in legal:
        shape.check_tp(tp)
    for tp in (0, 3, 5, 128):
        with pytest.raises(ConfigError) as error:
            shape.check_tp(tp)
        assert str(error.value).startswith(f"tp={tp}: {heads} query heads, {kv_heads} KV heads")
        assert str(error.value).endswith(f"need a TP size in {{{', '.join(map(str, legal))}}}")


def test_kv_bytes(tmp_path: Path) -> None:
    shape = read(tmp_path)  # 36 layers, 8 KV heads of 128, bf16
    assert shape.kv_bytes_per_token(1, 2) == 147_456
    assert shape.kv_bytes_per_token(8, 2) == 18_432
    assert shape.kv_bytes_per_token(32, 2) == 18_432  # one KV head at least


def test_expected_collectives(tmp_path: Path) -> None:
    shape = read(tmp_path)
    assert shape.expected_collectives(1, samples=True) == ()
    expected = shape.expected_collectives(4, samples=True)
    kinds = [kind for kind, _ in expected]
    assert kinds == [Kind.ALL_REDUCE] * 73 + [Kind.GATHER]
    assert [site for _, site in expected[:4]] == [
        Site.EMBED,
        Site.ATTN_O_PROJ,
        Site.MLP_DOWN_PROJ,
        Site.ATTN_O_PROJ,
    ]
    assert expected[:-1] == shape.expected_collectives(4, samples=False)
