"""Which attention backend and page size `auto` becomes on a GPU, and what is refused."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import replace
from importlib.machinery import ModuleSpec
from typing import Any

import pytest
import torch

from engine import resolve as resolve_module
from engine.attention import obstacles
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.resolve import resolve
from engine.shape import ModelShape
from tests.support.checkpoints import Checkpoints

FLASH, TRITON = "flash_attn", "triton"
CUTE = "only flash-attn-4"


@pytest.fixture
def shape(checkpoints: Checkpoints) -> ModelShape:
    return ModelShape.from_hf(checkpoints(head_dim=128))


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, shape: ModelShape) -> set[str]:
    """A machine with one GPU; the packages in the set are installed on it. (Set up after the shape,
    since transformers looks for packages too.)"""
    packages = {FLASH, TRITON}

    def find_spec(name: str, package: str | None = None) -> ModuleSpec | None:
        if name not in packages:
            return None
        # flash-attn-4 alone leaves a folder flash_attn without a module.
        return ModuleSpec(name, None, origin=None if CUTE in packages else f"{name}/__init__.py")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    return packages


@pytest.mark.parametrize(
    ("packages", "dtype", "page_size", "expected"),
    [
        ({FLASH, TRITON}, "bfloat16", None, ("flash2_triton", 256)),
        ({FLASH, TRITON}, "bfloat16", 512, ("flash2_triton", 512)),
        ({FLASH, TRITON}, "bfloat16", 16, ("triton", 16)),
        ({FLASH, TRITON}, "float32", None, ("triton", 64)),
        ({TRITON}, "bfloat16", None, ("triton", 64)),
        ({TRITON}, "bfloat16", 3, ("triton", 3)),
    ],
)
def test_auto_is_the_first_that_can_run(
    installed: set[str],
    shape: ModelShape,
    packages: set[str],
    dtype: str,
    page_size: int | None,
    expected: tuple[str, int],
) -> None:
    installed &= packages
    resolved = resolve(EngineConfig(model="", dtype=dtype, page_size=page_size), shape)
    assert (resolved.attention, resolved.page_size) == expected


def test_what_auto_passes_over_is_logged(
    installed: set[str], shape: ModelShape, caplog: pytest.LogCaptureFixture
) -> None:
    installed.remove(FLASH)
    with caplog.at_level(logging.INFO, "engine.resolve"):
        resolve(EngineConfig(model="", dtype="bfloat16"), replace(shape, head_dim=320))
    passed_over = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert passed_over == [
        *(
            f"attention=auto takes sdpa, not {other}: the package flash-attn is not installed; "
            "pip install flash-attn"
            for other in ("flash2_triton", "flash2")
        ),
        "attention=auto takes sdpa, not triton: head_dim=320: it takes up to 256",
    ]
    assert "attention=sdpa" in caplog.records[-1].message


@pytest.mark.parametrize(
    ("attention", "page_size"),
    [("flash2_triton", 256), ("flash2", 256), ("triton", 64), ("sdpa", 16)],
)
def test_a_backend_can_be_chosen(
    installed: set[str], shape: ModelShape, attention: str, page_size: int
) -> None:
    config = EngineConfig(model="", dtype="bfloat16", attention=attention)
    resolved = resolve(config, shape)
    assert (resolved.attention, resolved.page_size) == (attention, page_size)


def test_a_chosen_backend_that_cannot_run_is_refused(
    installed: set[str], shape: ModelShape
) -> None:
    large = replace(shape, head_dim=320)
    with pytest.raises(ConfigError, match="attention='triton': head_dim=320: it takes up to 256"):
        resolve(EngineConfig(model="", attention="triton"), large)
    with pytest.raises(ConfigError, match="attention='flash2': page_size=64: its pages are mult"):
        resolve(EngineConfig(model="", dtype="bfloat16", attention="flash2", page_size=64), shape)


@pytest.mark.parametrize("attention", ["auto", "sdpa", "triton"])
def test_a_gpu_without_triton_is_refused_whatever_is_asked(
    installed: set[str], shape: ModelShape, attention: str
) -> None:
    installed.remove(TRITON)
    asked: dict[str, Any] = {"fused": "none", "linear": "torch", "attention": attention}
    with pytest.raises(ConfigError) as refused:
        resolve(EngineConfig(model="", **asked), shape)
    assert str(refused.value) == (
        "device='auto': on a GPU the engine needs the package triton, which is not installed: "
        "whatever attention, fused and linear are, the sampler and what writes K and V to their "
        "pages are Triton kernels; pip install triton or set device=cpu"
    )
    on_cpu = resolve(EngineConfig(model="", device="cpu", enforce_eager=True), shape)
    assert (on_cpu.fused, on_cpu.linear) == ("none", "torch")


def test_symmetric_memory_is_for_gpus_that_reach_each_other(
    installed: set[str],
    shape: ModelShape,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    apart: list[tuple[int, int]] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *pair: pair not in apart)

    def comm(asked: str, dtype: str = "bfloat16", tp: int = 2) -> str:
        return resolve(EngineConfig(model="", tp=tp, comm=asked, dtype=dtype), shape).comm

    asked = ("auto", "symm_fused", "symm_mem", "nccl")
    assert [comm(a) for a in asked] == ["symm_fused", "symm_fused", "symm_mem", "nccl"]
    assert comm("symm_mem", tp=1) == comm("symm_fused", tp=1) == comm("auto", tp=1) == "solo"

    def refused(asked: str, dtype: str = "bfloat16") -> str:
        with pytest.raises(ConfigError) as error:
            comm(asked, dtype)
        return str(error.value)

    for path in ("symm_fused", "symm_mem"):
        assert refused(path, "float16") == (
            f"comm='{path}': its kernels sum bfloat16 and float32, not dtype=float16; set comm=nccl"
        )
    assert comm("auto", "float16") == "nccl"
    assert "comm=auto takes nccl, not symm_fused: its kernels sum" in caplog.text
    apart.append((1, 0))
    for path in ("symm_fused", "symm_mem"):
        assert refused(path) == (
            f"comm='{path}': GPU 1 cannot reach the memory of GPU 0; set comm=nccl"
        )
    assert comm("auto") == "nccl"
    assert "comm=auto takes nccl, not symm_fused: GPU 1 cannot" in caplog.text
    monkeypatch.setattr(resolve_module, "_ranks_here", lambda config: 1)
    assert comm("nccl") == comm("auto") == "nccl"
    for path in ("symm_fused", "symm_mem"):
        assert refused(path) == (
            f"comm='{path}': GPUs of one machine share memory, and 1 of tp=2 ranks are on this "
            "one; set comm=nccl"
        )
    with pytest.raises(
        ConfigError, match="comm='gloo': on device cuda this engine has symm_fused, "
    ):
        comm("gloo")


@pytest.fixture
def capability(monkeypatch: pytest.MonkeyPatch, installed: set[str]) -> list[int]:
    """That of the GPU; flash-attn-4 is installed where the set says so."""
    found = [9, 0]
    monkeypatch.setattr(obstacles, "_installed", lambda name: name in installed)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: tuple(found))
    installed.add("flash-attn-4")
    return found


def flash4(shape: ModelShape, **options: Any) -> tuple[str, int]:
    config = EngineConfig(model="", **{"dtype": "bfloat16", "attention": "flash4", **options})
    resolved = resolve(config, shape)
    return resolved.attention, resolved.page_size


def test_flash4_is_asked_for_by_name(capability: list[int], shape: ModelShape) -> None:
    assert flash4(shape) == ("flash4", 256)
    assert flash4(shape, attention="auto") == ("flash2_triton", 256)
    capability[:] = [10, 0]
    assert flash4(replace(shape, head_dim=256)) == ("flash4", 256)


def test_flash4_that_cannot_run_is_refused(
    capability: list[int], installed: set[str], shape: ModelShape
) -> None:
    def refused(why: str, own: ModelShape = shape, **options: Any) -> None:
        with pytest.raises(ConfigError, match=f"attention='flash4': {why}"):
            flash4(own, **options)

    refused("page_size=64: its pages are multiples of 256", page_size=64)
    refused("it has no float32 kernels", dtype="float32")
    refused("head_dim=320", replace(shape, head_dim=320))
    capability[:] = [10, 3]
    refused("head_dim=192: on this GPU", replace(shape, head_dim=192))
    for other in ([8, 0], [12, 0]):
        capability[:] = other
        refused(f"this GPU has compute capability {other[0]}.0: it needs 9.x, 10.x, 11.x")
    capability[:] = [9, 0]
    installed.add(CUTE)
    assert flash4(shape) == ("flash4", 256)
    with pytest.raises(ConfigError, match="attention='flash2': the package flash-attn is not inst"):
        flash4(shape, attention="flash2")
    installed.discard("flash-attn-4")
    refused("the package flash-attn-4 is not installed; pip install 'flash-attn-4")
    with pytest.raises(ConfigError, match="on device cpu this engine has sdpa"):
        flash4(shape, device="cpu", enforce_eager=True)


def test_own_kernels_are_a_gpus(installed: set[str], shape: ModelShape) -> None:
    def fused(asked: str, **options: Any) -> str:
        return resolve(
            EngineConfig(model="", fused=asked, dtype="bfloat16", **options), shape
        ).fused

    assert [fused(asked) for asked in ("auto", "none", "store")] == ["store", "none", "store"]
    on_cpu: dict[str, Any] = {"device": "cpu", "enforce_eager": True}
    assert fused("auto", **on_cpu) == "none"
    with pytest.raises(ConfigError, match="fused='store': on device cpu this engine has none"):
        fused("store", **on_cpu)


def test_rows_of_graphs_with_prompts(installed: set[str], shape: ModelShape) -> None:
    """This shape's own limit: 450 us at 400 TFLOP/s are 180e9 FLOPs, more than 4,096 rows of its
    layers need; twice the width of published 8B reaches it at 512."""
    gpu: dict[str, Any] = {"dtype": "bfloat16", "max_num_batched_tokens": 8192}

    def found(own: ModelShape = shape, **options: Any) -> int:
        return resolve(EngineConfig(model="", **{**gpu, **options}), own).graph_prompt_tokens

    assert found() == 4096
    wide = replace(shape, hidden_size=4096, num_heads=32, num_kv_heads=8, intermediate_size=12288)
    assert found(wide) == 512
    assert found(max_num_batched_tokens=1000) == 1000
    assert [found(graph_prompt_tokens=asked) for asked in (0, 1, 777, 8192)] == [0, 1, 777, 8192]
    assert found(graph_prompt_tokens=9000) == 8192, "no step has more rows"
    assert found(graph_prompt_tokens=777, attention="triton") == 777
    assert found(graph_prompt_tokens=777, enforce_eager=True) == 0
    on_cpu: dict[str, Any] = {"device": "cpu", "enforce_eager": True}
    assert [found(**on_cpu, graph_prompt_tokens=asked) for asked in (None, 0, 777)] == [0, 0, 0]


def test_prompts_that_no_graph_can_hold(installed: set[str], shape: ModelShape) -> None:
    def found(asked: int | None) -> int:
        config = EngineConfig(model="", attention="sdpa", graph_prompt_tokens=asked)
        return resolve(config, shape).graph_prompt_tokens

    assert found(None) == found(0) == 0
    with pytest.raises(ConfigError) as refused:
        found(512)
    assert str(refused.value) == (
        "graph_prompt_tokens=512: prompts by attention=sdpa wait for the host, which no graph can "
        "hold; set 0 or attention=flash2|flash2_triton|flash4|triton"
    )
    for wrong in (-1, 0.5, "all"):
        with pytest.raises(ConfigError, match=f"graph_prompt_tokens={wrong!r}: give an integer of"):
            EngineConfig(model="", graph_prompt_tokens=wrong)  # type: ignore[arg-type]


def test_products_of_a_gpu(installed: set[str], shape: ModelShape) -> None:
    def found(**options: Any) -> str:
        return resolve(EngineConfig(model="", dtype="bfloat16", **options), shape).linear

    assert [found(), found(linear="torch")] == ["triton", "torch"]
    on_cpu: dict[str, Any] = {"device": "cpu", "enforce_eager": True}
    assert found(**on_cpu) == "torch"
    with pytest.raises(ConfigError, match="linear='triton': on device cpu this engine has torch"):
        found(linear="triton", **on_cpu)
