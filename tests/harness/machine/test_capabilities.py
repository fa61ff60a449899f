"""What a machine cannot run, and what a skipped row says of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness.machine.capabilities import Machine, engine_flash4, skip_reason
from harness.planning.plan import resolve
from tests.support.fake_nvml import install, reading
from tests.support.plans import CPU, SHAPE, config, plan

NO_FLOAT = "it has no float32 kernels"
OTHERS = "is not in this version of the engine, which has"


def flash2(page_size: int | None, head_dim: int, dtype: str) -> str | None:
    """A machine whose flash-attn takes pages of 256 tokens and no float32."""
    if dtype == "float32":
        return NO_FLOAT
    return f"page_size={page_size}" if (page_size or 256) % 256 else None


def no_flash4(page_size: int | None, head_dim: int, dtype: str) -> str | None:
    return "not installed"


GPUS = Machine(
    gpus=4, cores=32, cxx=None, packages={"triton": "3.6"}, flash2=flash2, flash4=no_flash4
)
NO_FLASH = replace(GPUS, flash2=lambda *_: "not installed")
NO_TRITON = replace(GPUS, packages={})
NEEDS_TRITON = (
    "on a GPU the engine needs the package triton, which is not installed: whatever attention, "
    "fused and linear are, the sampler and what writes K and V to their pages are Triton kernels; "
    "pip install triton or set device=cpu"
)
APART = replace(GPUS, strangers=frozenset({(1, 0)}))
NODES = replace(GPUS, processes=4, processes_here=2)
SYMM_MEM = {"comm": "symm_mem", "tp": 2, "dtype": "bfloat16"}
SYMM_FUSED = {**SYMM_MEM, "comm": "symm_fused"}

SKIPPED = [
    (CPU, {"enforce_eager": False}, "CUDA graphs need a CUDA device; none visible"),
    (
        Machine(gpus=0, cores=2, cxx=None, packages={}),
        {"compile": "model"},
        "compile=model needs a C++ compiler; none found (install g++ or set CXX)",
    ),
    (CPU, {"compile": "model"}, None),
    (CPU, {"tp": 8}, None),
    (CPU, {"attention": "sdpa", "comm": "gloo"}, None),
    (CPU, {"attention": "flash2"}, "attention=flash2 needs a CUDA device; none visible"),
    (CPU, {"attention": "triton"}, "attention=triton needs a CUDA device; none visible"),
    (CPU, {"comm": "nccl"}, "comm=nccl needs a CUDA device; none visible"),
    (CPU, {"timing": "events"}, "timing=events needs a CUDA device; none visible"),
    (CPU, {"device": "cuda"}, "needs 1 GPU, 0 visible"),
    (GPUS, {"tp": 4}, None),
    (GPUS, {"tp": 8}, "needs 8 GPUs, 4 visible"),
    (GPUS, {"enforce_eager": False}, None),
    (GPUS, {"enforce_eager": False, "engine__graph_prompt_tokens": 512}, None),
    (
        GPUS,
        {"enforce_eager": False, "engine__graph_prompt_tokens": 512, "attention": "sdpa"},
        "engine.graph_prompt_tokens=512: no graph can hold prompts by sdpa",
    ),
    (GPUS, {"enforce_eager": False, "engine__graph_prompt_tokens": 0, "attention": "sdpa"}, None),
    (GPUS, {"engine__graph_prompt_tokens": 512, "attention": "sdpa"}, None),
    (GPUS, {"tp": 8, "device": "cpu"}, None),
    (GPUS, {"enforce_eager": False, "device": "cpu"}, "CUDA graphs need a CUDA device; device=cpu"),
    (GPUS, {"compile": "model"}, None),
    (GPUS, {"attention": "flash2"}, None),
    (GPUS, {"attention": "flash2", "page_size": 16}, "attention=flash2: page_size=16"),
    (GPUS, {"attention": "flash2", "dtype": "float32"}, f"attention=flash2: {NO_FLOAT}"),
    (NO_FLASH, {"attention": "flash2"}, "attention=flash2: not installed"),
    (GPUS, {"attention": "flash4"}, "attention=flash4: not installed"),
    (replace(GPUS, flash4=flash2), {"attention": "flash4"}, None),
    (CPU, {"attention": "flash4"}, "attention=flash4 needs a CUDA device; none visible"),
    (GPUS, {"attention": "triton", "page_size": 1, "dtype": "float32"}, None),
    (NO_TRITON, {}, NEEDS_TRITON),
    (NO_TRITON, {"attention": "sdpa", "engine__fused": "none"}, NEEDS_TRITON),
    (NO_TRITON, {"compile": "model"}, NEEDS_TRITON),
    (NO_TRITON, {"timing": "stamps"}, NEEDS_TRITON),
    (NO_TRITON, {"device": "cpu"}, None),
    (GPUS, SYMM_MEM, None),
    (
        GPUS,
        {**SYMM_MEM, "dtype": "float16"},
        "comm=symm_mem: its kernels sum bfloat16 and float32, not dtype=float16; set comm=nccl",
    ),
    (
        NODES,
        {**SYMM_MEM, "tp": 4},
        "comm=symm_mem: GPUs of one machine share memory, and 2 of tp=4 ranks are on this one; "
        "set comm=nccl",
    ),
    (NODES, SYMM_MEM, None),
    (
        APART,
        SYMM_MEM,
        "comm=symm_mem: GPU 1 cannot reach the memory of GPU 0; set comm=nccl",
    ),
    (replace(GPUS, strangers=frozenset({(1, 2)})), SYMM_MEM, None),
    (GPUS, SYMM_FUSED, None),
    (
        APART,
        SYMM_FUSED,
        "comm=symm_fused: GPU 1 cannot reach the memory of GPU 0; set comm=nccl",
    ),
    (APART, {**SYMM_MEM, "tp": 1, "dtype": "float16"}, None),
    (APART, {**SYMM_MEM, "comm": "auto"}, None),
    (APART, {**SYMM_MEM, "comm": "nccl"}, None),
    (GPUS, {"engine__fused": "store"}, None),
    (CPU, {"engine__fused": "none"}, None),
    (CPU, {"engine__fused": "store"}, "engine.fused=store needs a CUDA device; none visible"),
    (GPUS, {"comm": "gloo"}, f"comm=gloo {OTHERS} symm_fused, symm_mem, nccl on cuda"),
    (GPUS, {"comm": "nccl"}, None),
    (GPUS, {"timing": "events"}, None),
]


@pytest.mark.parametrize(("machine", "settings", "reason"), SKIPPED)
def test_what_cannot_run_says_why(
    machine: Machine, settings: dict[str, Any], reason: str | None
) -> None:
    found = skip_reason(resolve(config(**{"timing": "host", **settings}), machine), machine)
    assert found == reason


def test_flash4_asks_for_the_gpus_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which NVML tells without a CUDA context."""
    from engine.attention import obstacles as of_engine
    from harness.machine import hardware

    monkeypatch.setattr(of_engine, "_installed", lambda name: True)
    monkeypatch.setattr(of_engine, "flash2_obstacle", lambda *_: None)
    machine = replace(GPUS, flash4=engine_flash4)
    settings = resolve(config(attention="flash4", timing="host"), machine)
    for capability, reason in (("9.0", None), ("12.1", "this GPU has compute capability 12.1")):
        monkeypatch.setattr(hardware, "gpus", lambda c=capability: ({"capability": c},))
        found = skip_reason(settings, machine)
        assert found is None if reason is None else reason in str(found)


def test_attention_and_comm_are_asked_about_the_models_own_shape() -> None:
    half = replace(SHAPE, dtype="float16")
    settings = resolve(config(comm="symm_mem", tp=2, timing="host"), GPUS)
    assert "not dtype=float16" in str(skip_reason(settings, GPUS, half))
    assert skip_reason(settings, GPUS, SHAPE) is None
    settings = resolve(config(attention="triton", timing="host"), GPUS)
    assert skip_reason(settings, GPUS, replace(SHAPE, head_dim=320)) == (
        "attention=triton: head_dim=320: it takes up to 256"
    )


def test_a_probe_asks_nvml_which_gpus_reach_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, reading(p2p=[0, 5]), reading())
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert Machine.probe().strangers == {(0, 1)}
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert Machine.probe().strangers == frozenset()


def test_a_probe_counts_torchruns_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = Machine.probe()
    assert (alone.processes, alone.processes_here) == (0, 0)
    for name, value in {
        "TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    ours = Machine.probe()
    assert (ours.processes, ours.processes_here) == (4, 2)


def test_flash2_is_asked_about_the_models_own_shape() -> None:
    assert plan([config(attention="flash2", dtype="auto")], GPUS).points[0].skip == (
        "attention=flash2: it has no float32 kernels"  # SHAPE's weights are float32
    )
    points = plan([config(attention="flash2", dtype="bfloat16")], GPUS).points
    assert points[0].skip is None
