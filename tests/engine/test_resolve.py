"""Which attention backend and page size `auto` becomes on a GPU, and what is refused."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import replace
from importlib.machinery import ModuleSpec

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.resolve import resolve
from engine.shape import ModelShape
from tests.support.checkpoints import Checkpoints

FLASH, TRITON = "flash_attn", "triton"


@pytest.fixture
def shape(checkpoints: Checkpoints) -> ModelShape:
    return ModelShape.from_hf(checkpoints(head_dim=128))


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, shape: ModelShape) -> set[str]:
    """A machine with one GPU; the packages in the set are installed on it. (Set up after the shape,
    since transformers looks for packages too.)"""
    packages = {FLASH, TRITON}

    def find_spec(name: str, package: str | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, None) if name in packages else None

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    return packages


@pytest.mark.parametrize(
    ("packages", "dtype", "page_size", "expected"),
    [
        ({FLASH, TRITON}, "bfloat16", None, ("flash2", 256)),
        ({FLASH, TRITON}, "bfloat16", 512, ("flash2", 512)),
        ({FLASH, TRITON}, "bfloat16", 16, ("triton", 16)),
        ({FLASH, TRITON}, "float32", None, ("triton", 64)),
        ({TRITON}, "bfloat16", None, ("triton", 64)),
        ({TRITON}, "bfloat16", 3, ("triton", 3)),
        (set(), "bfloat16", None, ("sdpa", 16)),
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
    installed.clear()
    with caplog.at_level(logging.INFO, "engine.resolve"):
        resolve(EngineConfig(model="", dtype="bfloat16"), shape)
    passed_over = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert passed_over == [
        "attention=auto takes sdpa, not flash2: the package flash-attn is not installed; "
        "pip install flash-attn",
        "attention=auto takes sdpa, not triton: the package triton is not installed; "
        "pip install triton",
    ]
    assert "attention=sdpa" in caplog.records[-1].message


@pytest.mark.parametrize(
    ("attention", "page_size"), [("flash2", 256), ("triton", 64), ("sdpa", 16)]
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
    installed.clear()
    with pytest.raises(ConfigError, match="attention='triton': the package triton is not inst"):
        resolve(EngineConfig(model="", attention="triton"), shape)
    with pytest.raises(ConfigError, match="this engine has flash2, triton, sdpa"):
        resolve(EngineConfig(model="", attention="flash4"), shape)


def test_symmetric_memory_is_asked_for_by_name(
    installed: set[str], shape: ModelShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    def comm(asked: str, dtype: str = "bfloat16", tp: int = 2) -> str:
        return resolve(EngineConfig(model="", tp=tp, comm=asked, dtype=dtype), shape).comm

    assert [comm("auto"), comm("symm_mem"), comm("nccl")] == ["nccl", "symm_mem", "nccl"]
    assert comm("symm_mem", tp=1) == "solo"
    with pytest.raises(ConfigError, match="comm='symm_mem': its kernels sum bfloat16 and float32"):
        comm("symm_mem", "float16")
    with pytest.raises(ConfigError, match="comm='gloo': on device cuda this engine has nccl, symm"):
        comm("gloo")
