"""Loading, decode steps in each mode, sampling: what a rank does on its device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine import EngineConfig, ModelShape, SamplingParams
from engine.comm.solo import SoloCommunicator
from engine.comm.types import Phase
from engine.core import EngineCore
from engine.execution.launched import Launched
from engine.execution.runner import Runner
from engine.models.qwen import Qwen3ForCausalLM
from engine.requests.request import Request
from engine.resolve import resolve
from engine.sampling.sampler import Sampler
from engine.weights import checkpoint_tensors, dummy_tensor, load_weights
from harness.machine.capabilities import Machine, skip_reason
from tests.support.measuring import Measure
from tests.support.plans import config as settings
from tests.support.sampling import race_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONFIG: dict[str, Any] = {
    "model_type": "qwen3", "vocab_size": 2048, "hidden_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "intermediate_size": 256,
    "rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "max_position_embeddings": 512,
    "tie_word_embeddings": False, "attention_bias": False, "torch_dtype": "float32",
}  # fmt: skip
MODES = {
    "eager": ("off", True),
    "compile_layer": ("layer", True),
    "compile_model": ("model", True),
    "graphs": ("off", False),
    "graphs_compile_model": ("model", False),
}
BATCH, CONTEXT = 8, 200


def folder(path: Path) -> Path:
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


@pytest.mark.parametrize("mode", MODES)
def test_decode_step(
    measure: Measure, mode: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Launch and collection of one step of 8 sequences, which writes the same K/V each time."""
    scope, eager = MODES[mode]
    asked = {"device": DEVICE, "compile": scope, "enforce_eager": eager}
    if reason := skip_reason(settings(**asked), Machine.probe()):
        pytest.skip(reason)
    if scope != "off" and not request.config.getoption("benchmark_enable"):
        pytest.skip("compiling takes seconds; tests/engine/test_llm_tokens.py tests what comes out")
    shape = ModelShape.from_hf(folder(tmp_path))
    config = EngineConfig(
        model=str(tmp_path), load_format="dummy", num_pages=512, prefix_cache=False, overlap=False,
        max_num_seqs=2 * BATCH, max_num_batched_tokens=2 * BATCH * CONTEXT, max_model_len=256,
        threads_per_rank=1, **asked,
    )  # fmt: skip
    runner = Runner(resolve(config, shape), shape, SoloCommunicator())
    try:
        core = EngineCore(runner)
        prompts = torch.randint(2048, (BATCH, CONTEXT), generator=torch.Generator().manual_seed(0))
        one_by_one = serve(core, "a", prompts.tolist())
        schedule, plan = core.plan()
        assert plan is not None and plan.phase is Phase.DECODE
        last = runner._buffers.last_tokens
        first = last.clone()

        def step(_: torch.Tensor) -> Launched:
            launched = runner.launch(plan)
            runner.collect(launched)
            return launched

        launched = measure(step, lambda: last.copy_(first), rounds=50)
        core.collect(schedule, launched)
        found = [r.output_ids[1] for r in one_by_one]
        assert runner.counters()["compiles"] == {"off": 0, "layer": 4, "model": 2}[scope]
        # The same token comes of a prompt that holds the one before it.
        longer = [r.prompt_ids + r.output_ids[:1] for r in one_by_one]
        assert found == [r.output_ids[0] for r in serve(core, "b", longer)]
        assert len(set(found)) > BATCH // 2
    finally:
        runner.close()


def serve(core: EngineCore, name: str, prompts: list[list[int]]) -> list[Request]:
    """The prompts' requests, each with one token of output."""
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    asked = [Request(f"{name}{i}", p, params, 0, 0.0) for i, p in enumerate(prompts)]
    for request in asked:
        core.add(request)
    while not all(r.output_ids for r in asked):
        core.step()
    core.settle()
    return asked


def test_weight_loading(measure: Measure, tmp_path: Path) -> None:
    shape = ModelShape.from_hf(folder(tmp_path))
    model = Qwen3ForCausalLM(shape, SoloCommunicator(), "sdpa", 64, torch.float32, DEVICE)
    wanted = checkpoint_tensors(model)
    kept = {
        name: dummy_tensor(name, tensor.shape, 0, torch.device("cpu"))
        for name, tensor in wanted.items()
    }
    save_file(kept, tmp_path / "model.safetensors")
    measure(lambda: load_weights(model, tmp_path))
    found = dict(model.named_parameters())
    assert torch.equal(found["lm_head.weight"].cpu(), kept["lm_head.weight"])
    assert torch.equal(
        found["model.layers.1.mlp.down_proj.weight"].cpu(),
        kept["model.layers.1.mlp.down_proj.weight"],
    )


def test_sampler(measure: Measure) -> None:
    """Eight rows of 8,192 logits, half of them greedy; the first two against float64."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(8, 8192, generator=generator)
    temperatures = torch.tensor([0.0, 0.8] * 4)
    seeds, positions = torch.arange(8), torch.arange(8) + 100
    given = [x.to(DEVICE) for x in (logits, temperatures, seeds, positions)]
    sampler = Sampler()
    ids = measure(lambda: sampler(*given))
    for row in (0, 1):
        reference, ahead = race_reference(
            logits[row].double().numpy(), float(temperatures[row]), row, 100 + row
        )
        assert ahead > 1e-4 and int(ids[row]) == reference
