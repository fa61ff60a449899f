"""What is built while weights load is what steps launch: no kernel less, none more.

The steps run a rank's own code on CPU tensors that are taken for a GPU's, beside a GPU that
launches nothing.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from engine import layers
from engine.attention import flash
from engine.comm.solo import SoloCommunicator
from engine.config import ResolvedConfig
from engine.execution import prebuild
from engine.execution.prebuild import _Rank, first_launches, prebuilding
from engine.execution.warmup import warmup_steps
from engine.graph_shapes import bucket_sizes
from engine.inputs.batch import ForwardBatch
from engine.inputs.buffers import BatchBuffers, SamplingRows
from engine.kernels import Kernels, store_kv, triton_builds
from engine.kv_cache import KVCache
from engine.models import qwen
from engine.requests.request import Request
from engine.requests.sampling_params import SamplingParams
from engine.sampling import sampler
from engine.sampling import stage as sampling_stage
from engine.sampling.plan import SamplingPlan
from engine.sampling.stage import SamplingStage
from engine.scheduling.step import ScheduledSeq
from engine.shape import ModelShape
from tests.support import fake_cuda
from tests.support.plans import SHAPE

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)
pytest.importorskip("triton")

MODEL = replace(SHAPE, hidden_size=256, head_dim=64, intermediate_size=4096, dtype="bfloat16")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[fake_cuda.FakeCuda]:
    for module in (layers, qwen, store_kv, sampler, sampling_stage):
        monkeypatch.setattr(module, "runs_triton", lambda x: True)
    for name in ("chunks", "decode"):
        monkeypatch.setattr(flash, name, lambda q, *args: torch.zeros_like(q))
    package, cute = ModuleType("flash_attn"), ModuleType("flash_attn.cute")
    cute.flash_attn_varlen_func = lambda q, *args, **options: (torch.zeros_like(q), None)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", cute)
    yield fake_cuda.install(monkeypatch, str(tmp_path))


def resolved(**changes: Any) -> ResolvedConfig:
    given: dict[str, Any] = {
        "model": "", "device": "cuda", "dtype": "bfloat16", "attention": "triton",
        "fused": "store", "linear": "triton", "comm": "nccl", "enforce_eager": False,
        "max_model_len": 512, "page_size": 64, "num_pages": 4, "threads_per_rank": 2,
        "max_num_seqs": 80, "max_num_batched_tokens": 512,
    }  # fmt: skip
    return ResolvedConfig(**{**given, **changes})


@torch.inference_mode()
def serve(config: ResolvedConfig, shape: ModelShape, rank: int, kernels: Kernels) -> None:
    """The step that measures memory, the warm-up, a step of each bucket: a rank until it serves."""
    comm, cpu = _Rank(rank, config), torch.device("cpu")
    dtype, sizes = getattr(torch, config.dtype), (config.max_num_batched_tokens, 1)
    given = (shape, comm, config.attention, config.max_model_len, dtype, cpu, kernels)
    model = qwen.Qwen3ForCausalLM(*given)
    for weight in model.parameters():
        torch.nn.init.zeros_(weight)
    assert config.num_pages is not None
    cache = KVCache(shape, config.tp, config.num_pages, config.page_size, dtype, cpu)
    buffers = BatchBuffers(
        max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len, page_size=config.page_size,
        dummy_page=config.num_pages, device=cpu,
    )  # fmt: skip
    stage = SamplingStage(
        comm, buffers.last_tokens, max_num_seqs=config.max_num_seqs, vocab_size=shape.vocab_size
    )

    def steps() -> Iterator[tuple[ForwardBatch, SamplingRows]]:
        yield from warmup_steps(config, buffers, sizes)
        for rows in bucket_sizes(config.max_num_seqs):
            buffers.fill_padding(rows)
            yield buffers.views(rows, rows, (rows, 1, 1, rows), all_greedy=False)

    for batch, rows in steps():
        logits = model.compute_logits(model(batch, cache), batch)
        stage(logits, rows, None)
        stage.warm_up(rows)


def builds(noted: Iterator[Any]) -> set[tuple[Any, ...]]:
    """Kernel and what Triton tells apart, without the device."""
    from engine.kernels.launch import specialized

    return {(f.func.__self__.jit.__name__, *map(str, specialized(f.args[0])[1:])) for f in noted}


def test_steps_launch_what_was_built(gpu: fake_cuda.FakeCuda) -> None:
    config = resolved()
    before = triton_builds()
    for build in first_launches(config, MODEL, rank=0):
        build()
    built = triton_builds() - before
    assert gpu.launches == [] and built == gpu.loads
    serve(config, MODEL, 0, Kernels("store", "triton"))
    assert triton_builds() - before == gpu.loads == built > 9
    assert {function for _, function, _ in gpu.launches} == set(range(1, built + 1))
    for build in first_launches(config, MODEL, rank=0):
        build()
    assert gpu.loads == built


def test_a_step_with_a_plan_launches_what_was_warmed_up(gpu: fake_cuda.FakeCuda) -> None:
    """Top-k asks for a plan; its rows are sampled from a float32 copy of bf16 logits."""
    vocab, count = 4096, 3
    last = torch.zeros(9, dtype=torch.int64)
    stage = SamplingStage(SoloCommunicator(), last, max_num_seqs=8, vocab_size=vocab)
    ints = torch.zeros(count, dtype=torch.int64)
    rows = SamplingRows(ints + torch.arange(count), torch.ones(count), ints, ints, all_greedy=True)
    stage.warm_up(rows)
    built, launched = gpu.loads, len(gpu.launches)
    assert built == launched == 2
    request = Request("r", [1, 2], SamplingParams(top_k=5), seed=0, arrival_s=0.0)
    plan = SamplingPlan.from_schedule([ScheduledSeq(request, 0, 2, True)] * count, vocab, ())
    logits = torch.randn(count, vocab, dtype=torch.bfloat16)
    stage(logits, replace(rows, all_greedy=False), plan)
    assert (gpu.loads, len(gpu.launches)) == (built, launched + 2)


MODELS = {
    "qwen3": MODEL,
    "qwen2": replace(MODEL, qk_norm=False, qkv_bias=True, tied=False),
    "biases": replace(MODEL, qkv_bias=True, o_bias=True, num_layers=1),
    "few K/V heads": replace(MODEL, head_dim=128, num_heads=8, num_kv_heads=2),
    "odd sizes": replace(MODEL, hidden_size=200, intermediate_size=1000, vocab_size=1001),
}
CONFIGS: dict[str, dict[str, Any]] = {
    "usual": {},
    "flash2_triton": {"attention": "flash2_triton", "page_size": 256},
    "flash2": {"attention": "flash2", "page_size": 256},
    "flash4": {"attention": "flash4", "page_size": 256},
    "few sequences": {"max_num_seqs": 4, "enforce_eager": True},
    "one short sequence": {"max_num_seqs": 1, "max_model_len": 40, "max_num_batched_tokens": 1},
    "many sequences": {"max_num_seqs": 300, "max_num_batched_tokens": 300},
    "layers": {"fused": "layers", "linear": "torch", "dtype": "float16"},
    "products alone": {"fused": "none", "dtype": "float32"},
    "nothing": {"fused": "none", "linear": "torch", "attention": "sdpa"},
    "two ranks": {"tp": 2},
    "the second of two": {"tp": 2, "rank": 1},
}


@pytest.mark.parametrize(
    ("name", "model"),
    [(name, "qwen3") for name in CONFIGS]
    + [(name, model) for name in ("usual", "two ranks") for model in MODELS if model != "qwen3"],
)
def test_what_is_built_is_what_steps_launch(gpu: fake_cuda.FakeCuda, name: str, model: str) -> None:
    from engine.kernels.launch import noting

    given = dict(CONFIGS[name])
    rank, shape = given.pop("rank", 0), MODELS[model]
    config = resolved(**given)
    found = builds(iter(first_launches(config, shape, rank)))
    with noting() as noted:
        serve(config, shape, rank, Kernels(config.fused, config.linear))
    assert found == builds(iter(noted.values())) and found


def test_compiled_code_needs_the_kernels_of_operators(gpu: fake_cuda.FakeCuda) -> None:
    """And those of layers where the step is run that measures memory, which is not compiled."""
    names = {
        (scope, pages): {
            name
            for name, *_ in builds(
                iter(first_launches(resolved(compile=scope, num_pages=pages), MODEL, rank=0))
            )
        }
        for scope in ("off", "layer", "model")
        for pages in (None, 4)
    }
    layers_own = {"_rms_norm", "_norm_and_rotate"}
    operators = {"_linear", "_decode", "_combine", "_prefill", "_silu_and_mul", "_block_max",
                 "_block_race"}  # fmt: skip
    assert names["off", None] == names["off", 4] == operators | layers_own
    assert names["model", 4] == operators | {"_store"}
    # Behind compiled layers the last norm is a kernel.
    assert names["layer", 4] == names["layer", None] == names["model", None]
    assert names["model", None] == operators | layers_own | {"_store"}


def test_sums_that_are_one_with_a_norm_are_built_for_either_way(gpu: fake_cuda.FakeCuda) -> None:
    many = {"max_num_seqs": 1100, "max_num_batched_tokens": 1100}
    apart, one = (
        builds(iter(first_launches(resolved(tp=2, comm=comm, **many), MODEL, rank=1)))
        for comm in ("symm_mem", "symm_fused")
    )
    ((name, *what),) = one - apart
    assert name == "_reduce_add_norm" and not apart - one
    assert {"('RANK', 1)", "('WORLD', 2)", "('MAX_ROWS', 1024)", "('BLOCK', 256)"} <= set(what)


@pytest.fixture
def threads(gpu: fake_cuda.FakeCuda, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The GPUs that threads chose; the fake one is the current one."""
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: gpu.device)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    return chosen


def given(monkeypatch: pytest.MonkeyPatch, *tasks: Callable[[], None]) -> None:
    monkeypatch.setattr(prebuild, "first_launches", lambda *args: list(tasks))


def test_threads_build_on_the_callers_gpu_and_are_waited_for(
    threads: list[int], gpu: fake_cuda.FakeCuda
) -> None:
    with prebuilding(resolved(), MODEL, 0):
        caller = torch.ones(3).sum()
    loads = gpu.loads
    assert caller == 3 and loads > 9 and set(threads) == {gpu.device}
    for build in first_launches(resolved(), MODEL, rank=0):
        build()
    assert gpu.loads == loads


def test_kernels_in_the_cache_are_loaded_as_they_are_launched(
    threads: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def loads(config: ResolvedConfig, rank: int = 0) -> int:
        """By a rank that starts on a GPU that holds none yet."""
        gpu = fake_cuda.install(monkeypatch, str(tmp_path))
        with prebuilding(config, MODEL, rank):
            pass
        return gpu.loads

    config = resolved()
    assert loads(config) > 9
    assert loads(config) == 0
    assert loads(replace(config, linear="torch")) > 3 and loads(config, rank=1) > 9
    shutil.rmtree(tmp_path)
    assert loads(config) > 9


def test_what_fails_is_said_and_the_rest_built(
    threads: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("no ptxas")

    done: list[int] = []
    given(monkeypatch, fail, *[lambda n=n: done.append(n) for n in range(9)])
    with caplog.at_level(logging.WARNING), prebuilding(resolved(), MODEL, 0):
        pass
    assert "built as they are launched" in caplog.text and "no ptxas" in caplog.text
    assert sorted(done) == list(range(9))
    with prebuilding(resolved(), MODEL, 0):  # the cache is not said to hold them
        pass
    assert len(done) == 18


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failure_of_the_caller_waits_for_no_build(
    threads: list[int], monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """Two are under way when it comes; the others never begin."""
    begun: list[float] = []

    def build() -> None:
        begun.append(time.monotonic())
        time.sleep(0.2)

    given(monkeypatch, *[build] * 50)
    with pytest.raises(error, match="weights"), prebuilding(resolved(), MODEL, 0):
        while len(begun) < 2:
            time.sleep(0.001)
        raise error("weights")
    time.sleep(0.5)
    assert len(begun) < 10
