"""What a device holds while a checkpoint loads into it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.comm import SoloCommunicator
from engine.models import Qwen3ForCausalLM
from engine.shape import ModelShape
from engine.weights import load_weights

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_device_holds_the_shard_alone(qwen3_0_6b: Path, dtype: torch.dtype) -> None:
    """Parts are converted on the host: no second copy of a tensor on the device, 311 MB for the
    table in bf16."""
    shape = ModelShape.from_hf(qwen3_0_6b)
    model = Qwen3ForCausalLM(shape, SoloCommunicator(), "sdpa", 64, dtype, "cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    load_weights(model, qwen3_0_6b)
    assert torch.cuda.max_memory_allocated() - before < 1 << 20
    file = load_file(qwen3_0_6b / "model.safetensors")
    table = file["model.embed_tokens.weight"].to(dtype)
    assert torch.equal(model.lm_head.weight.cpu(), table)
    for name in ("model.layers.27.self_attn.o_proj.weight", "model.layers.3.mlp.down_proj.weight"):
        assert torch.equal(model.get_parameter(name).cpu(), file[name].to(dtype))
