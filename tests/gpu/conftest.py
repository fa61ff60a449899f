from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.checkpoints import Checkpoints

# Attention sizes of every published Qwen3 (flash-attn is often built for head_dim 128 alone).
HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 128}


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session")
def qwen3_0_6b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The 0.6B shape in bf16 with normals of 0.02, saved by transformers."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rope_theta=1e6,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith("norm.weight"):
                parameter.normal_(0.0, 0.02)
    path = tmp_path_factory.mktemp("qwen3-0.6b")
    model.save_pretrained(path)
    del model
    torch.cuda.empty_cache()
    return path
