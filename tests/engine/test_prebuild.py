"""What is built while weights load is what steps launch: no kernel less, none more.

The steps run a rank's own code on CPU tensors that are taken for a GPU's, beside a GPU that
launches nothing.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import layers, prebuild, sampler
from engine.attention import flash
from engine.batch import ForwardBatch
from engine.buffers import BatchBuffers, SamplingRows
from engine.comm.solo import SoloCommunicator
from engine.config import ResolvedConfig
from engine.graphs import bucket_sizes
from engine.kernels import Kernels, store_kv, triton_builds
from engine.kv_cache import KVCache
from engine.models import qwen
from engine.prebuild import Prebuild, first_launches
from engine.sampling_stage import SamplingStage
from engine.warmup import warmup_steps
from tests.support import fake_cuda
from tests.support.plans import SHAPE

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)
pytest.importorskip("triton")

MODEL = replace(SHAPE, hidden_size=256, head_dim=64, intermediate_size=4096, dtype="bfloat16")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[fake_cuda.FakeCuda]:
    for module in (layers, qwen, store_kv, sampler):
        monkeypatch.setattr(module, "runs_triton", lambda x: True)
    monkeypatch.setattr(flash, "chunks", lambda q, *args: torch.zeros_like(q))
    yield fake_cuda.install(monkeypatch, str(tmp_path))


def resolved(**changes: Any) -> ResolvedConfig:
    given: dict[str, Any] = {
        "model": "", "device": "cuda", "dtype": "bfloat16", "attention": "triton",
        "fused": "store", "linear": "triton", "comm": "nccl", "enforce_eager": False,
        "max_model_len": 512, "page_size": 64, "num_pages": 4, "threads_per_rank": 1,
        "max_num_seqs": 80, "max_num_batched_tokens": 512,
    }  # fmt: skip
    return ResolvedConfig(**{**given, **changes})


@torch.inference_mode()
def serve(config: ResolvedConfig, kernels: Kernels) -> None:
    """The step that measures memory, the warm-up and a step of each bucket."""
    comm, cpu = SoloCommunicator(), torch.device("cpu")
    half, sizes = torch.bfloat16, (config.max_num_batched_tokens, 1)
    given = (MODEL, comm, config.attention, config.max_model_len, half, cpu, kernels)
    model = qwen.Qwen3ForCausalLM(*given)
    for weight in model.parameters():
        torch.nn.init.zeros_(weight)
    assert config.num_pages is not None
    cache = KVCache(MODEL, 1, config.num_pages, config.page_size, half, cpu)
    buffers = BatchBuffers(
        max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len, page_size=config.page_size,
        dummy_page=config.num_pages, device=cpu,
    )  # fmt: skip
    stage = SamplingStage(
        comm, buffers.last_tokens, max_num_seqs=config.max_num_seqs, vocab_size=MODEL.vocab_size
    )

    def steps() -> Iterator[tuple[ForwardBatch, SamplingRows]]:
        yield from warmup_steps(config, buffers, sizes)
        for rows in bucket_sizes(config.max_num_seqs):
            buffers.fill_padding(rows)
            yield buffers.views(rows, rows, (rows, 1, 1, rows), all_greedy=False)

    for batch, rows in steps():
        stage(model.compute_logits(model(batch, cache), batch), rows, None)
    comm.close()


CONFIGS: dict[str, dict[str, Any]] = {
    "usual": {},
    "flash2_triton": {"attention": "flash2_triton", "page_size": 256},
    "few sequences": {"max_num_seqs": 4, "enforce_eager": True},
    "layers": {"fused": "layers", "linear": "torch"},
    "products alone": {"fused": "none"},
    "nothing": {"fused": "none", "linear": "torch"},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_steps_launch_what_was_built(gpu: fake_cuda.FakeCuda, name: str) -> None:
    config = resolved(**CONFIGS[name])
    before = triton_builds()
    for build in first_launches(config, MODEL, rank=0):
        build()
    built = triton_builds() - before
    assert gpu.launches == [] and built == gpu.loads
    serve(config, Kernels(config.fused, config.linear))
    assert triton_builds() - before == gpu.loads == built > 0
    assert {function for _, function, _ in gpu.launches} == set(range(1, built + 1))
    assert not first_launches(config, MODEL, rank=0)


def test_compiled_code_needs_the_kernels_of_operators_too(gpu: fake_cuda.FakeCuda) -> None:
    """And the step that measures memory, which is not compiled, those of the layers."""
    names = {
        scope: {
            build.func.__self__.jit.__name__
            for build in first_launches(resolved(compile=scope), MODEL, rank=0)
        }
        for scope in ("off", "model")
    }
    assert names["model"] - names["off"] == {"_store"}
    assert names["off"] == {
        "_linear", "_decode", "_combine", "_prefill", "_rms_norm", "_norm_and_rotate",
        "_silu_and_mul", "_block_max", "_block_race",
    }  # fmt: skip


def test_ranks_build_for_their_part_and_the_first_alone_samples(gpu: fake_cuda.FakeCuda) -> None:
    found = {}
    for rank in (0, 1):
        builds = first_launches(resolved(tp=2), MODEL, rank=rank)
        found[rank] = {build.func.__self__.jit.__name__: build.args[3] for build in builds}
    assert set(found[0]) - set(found[1]) == {"_block_max", "_block_race"}
    assert found[1]["_decode"]["KV_HEADS"] == 4


def test_a_gpus_sampling_and_storing_are_always_own(gpu: fake_cuda.FakeCuda) -> None:
    config = resolved(fused="none", linear="torch", attention="sdpa")
    names = {b.func.__self__.jit.__name__ for b in first_launches(config, MODEL, rank=0)}
    assert names == {"_store", "_block_max", "_block_race"}


@pytest.fixture
def threads(gpu: fake_cuda.FakeCuda, monkeypatch: pytest.MonkeyPatch) -> fake_cuda.FakeCuda:
    """Threads find the fake GPU and say that they chose it."""
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: gpu.device)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    gpu.chosen = chosen
    return gpu


def test_threads_build_while_the_caller_goes_on(threads: fake_cuda.FakeCuda) -> None:
    with Prebuild(resolved(), MODEL, 0):
        caller = torch.ones(3).sum()
    assert caller == 3 and threads.loads > 5 and set(threads.chosen) == {threads.device}
    loads = threads.loads
    for build in first_launches(resolved(), MODEL, rank=0):
        build()
    assert threads.loads == loads


def test_what_fails_is_said_and_left_to_the_launch(
    threads: fake_cuda.FakeCuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("no ptxas")

    monkeypatch.setattr(prebuild, "first_launches", lambda *args: [fail])
    with caplog.at_level(logging.WARNING), Prebuild(resolved(), MODEL, 0):
        pass
    assert "built as they are launched" in caplog.text and "no ptxas" in caplog.text


def test_a_failure_of_the_caller_waits_for_no_build(threads: fake_cuda.FakeCuda) -> None:
    with pytest.raises(ValueError, match="weights"), Prebuild(resolved(), MODEL, 0):
        raise ValueError("weights")
