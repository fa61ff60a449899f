"""Triton kernels compiled for an H200 through the code that launches them, where no GPU is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.attention import triton_paged
from engine.attention.paged import Paged
from engine.kernels import triton_builds

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)
pytest.importorskip("triton")

SHARED_BYTES = 227 * 1024  # that one program may take of an H200's multiprocessor
DEVICE = 99  # no device's number, so that nothing built here is launched elsewhere
MAX_NUM_SEQS = 256


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Launches compile for compute capability 9.0 and run nothing; name -> kernel built last."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    run, found, functions = JITFunction.run, {}, set()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    target = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: DEVICE,
        get_current_stream=lambda device: 0,
    )
    monkeypatch.setattr(driver, "_active", target)

    def build(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        functions.add(self)
        found[self.__name__] = run(self, *args, grid=grid, warmup=True, **options)

    monkeypatch.setattr(JITFunction, "run", build)
    yield found
    for function in functions:
        function.device_caches.pop(DEVICE)


def attend(
    decodes: int,
    chunks: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    heads: int = 32,
    head_dim: int = 128,
    page_size: int = 64,
) -> None:
    """Chunks are of 7 rows each; 8 K/V heads."""
    q = torch.zeros(decodes + 7 * chunks, heads, head_dim, dtype=dtype)
    cache = torch.zeros(2, page_size, 8, head_dim, dtype=dtype)
    tables = torch.zeros(MAX_NUM_SEQS, 4096 // page_size, dtype=torch.int32)
    lens = torch.zeros(MAX_NUM_SEQS, dtype=torch.int32)
    starts = torch.zeros(MAX_NUM_SEQS + 1, dtype=torch.int32)
    meta = torch.tensor([decodes + chunks, 7, 4096, decodes], dtype=torch.int32)
    paged = Paged(cache, cache, tables, lens, starts, starts, meta)
    triton_paged.attend(q, paged, 0.1)


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"page_size": 16},
        {"heads": 40, "head_dim": 64, "dtype": torch.float16},
        {"heads": 8, "head_dim": 256},
        {"dtype": torch.float32},
    ],
    ids=str,
)
def test_attention_compiles_and_fits(built: dict[str, Any], shape: dict[str, Any]) -> None:
    attend(2, 1, **shape)
    assert {name: k.metadata.shared <= SHARED_BYTES for name, k in built.items()} == dict.fromkeys(
        ("_decode", "_combine", "_prefill"), True
    )
    # Two tiles of K and of V, so that one travels while the other is multiplied.
    assert built["_decode"].metadata.shared >= 4 * 16384
    attend(80, 0, **shape)
    tile = 16 * shape.get("head_dim", 128) * shape.get("dtype", torch.bfloat16).itemsize
    assert 4 * tile <= built["_decode"].metadata.shared <= 3 * 16384
    assert "cp.async" in built["_decode"].asm["ptx"]


def test_no_build_follows_a_change_of_lengths_or_numbers(built: dict[str, Any]) -> None:
    """All that is built: decoding without splits, with them and in narrow tiles, combining any
    number of splits, and one kernel for prompts."""
    first = triton_builds()
    for decodes in (1, 2, 4, 8, 17, 67):
        attend(decodes, 0)
    attend(3, 2)
    count = triton_builds()
    for decodes in (1, 3, 5, 16, 17, 64, 128, 256):
        attend(decodes, 0)
    for decodes, chunks in ((0, 1), (0, 16), (1, 1), (16, 3), (100, 100)):
        attend(decodes, chunks)
    assert triton_builds() == count == first + 5


def test_layers_compile_once_for_any_number_of_tokens(built: dict[str, Any]) -> None:
    from engine.kernels import layers_triton as layers
    from engine.kernels import rotate_triton as rotation

    weight = torch.ones(128, dtype=torch.bfloat16)
    first, counts = triton_builds(), []
    for tokens in (1, 2, 16, 100):
        qkv = torch.zeros(tokens, 16 + 8 + 8, 128, dtype=torch.bfloat16)
        rotary = torch.zeros(tokens, 1, 128)
        q, k = qkv[:, :16], qkv[:, 16:24]
        rotation.norm_and_rotate_triton(q, k, (weight, weight), 1e-6, rotary)
        rotation.norm_and_rotate_triton(q, k, None, 0.0, rotary)
        cache, slots = torch.zeros(9, 64, 8, 128, dtype=q.dtype), torch.zeros(tokens).long()
        stored = (rotary, cache, cache, slots)
        rotation.norm_rotate_store_triton(q, k, qkv[:, 24:], (weight, weight), 1e-6, *stored)
        x = qkv.flatten(1)
        layers.add_rms_norm_triton(x, x, torch.ones(x.shape[1], dtype=x.dtype), 1e-6)
        layers.rms_norm_triton(x, torch.ones(x.shape[1], dtype=x.dtype), 1e-6)
        layers.silu_and_mul_triton(x)
        counts.append(triton_builds() - first)
    assert counts[0] == counts[-1] == 6
    assert set(built) == {"_norm_and_rotate", "_rms_norm", "_silu_and_mul"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("size", "inner"), [(4096, 1024), (51200, 5120)])
def test_every_product_fits(
    built: dict[str, Any], size: int, inner: int, gated: bool, dtype: torch.dtype
) -> None:
    """In shared memory; four builds serve all numbers of rows."""
    from engine.kernels.linear_triton import linear_triton

    weight = torch.zeros(size, inner, dtype=dtype)
    first, counts = triton_builds(), []
    for rows in (1, 2, 3, 16, 17, 32, 33, 64):
        linear_triton(torch.zeros(rows, inner, dtype=dtype), weight, gated=gated)
        counts.append(triton_builds() - first)
        assert built["_linear"].metadata.shared <= SHARED_BYTES
    assert counts == [1, 2, 2, 2, 3, 3, 4, 4]
