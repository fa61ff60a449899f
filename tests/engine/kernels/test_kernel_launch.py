"""A launch that is looked up is the launch that Triton would have made: build, grid, arguments."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)
pytest.importorskip("triton")

import triton.language as tl

from engine.kernels.launch import Kernel, cdiv, kernel, next_power_of_2
from tests.support import fake_cuda


def _body(x_ptr, y_ptr, other_ptr, rows, stride, scale, BLOCK: tl.constexpr, FLAG: tl.constexpr):
    at = tl.program_id(0) * stride + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < rows) * scale
    if FLAG and other_ptr is not None:
        x += tl.load(other_ptr + at)
    tl.store(y_ptr + at, x)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[fake_cuda.FakeCuda]:
    yield fake_cuda.install(monkeypatch, str(tmp_path))


X = torch.zeros(64, dtype=torch.bfloat16)
VARIANTS: dict[str, tuple[tuple[int, ...], tuple[Any, ...], dict[str, Any]]] = {
    "usual": ((3,), (X, X, X, 5, 32, 0.5), {"BLOCK": 16, "FLAG": True}),
    "two-dimensional": ((3, 2), (X, X, X, 5, 32, 0.5), {"BLOCK": 16, "FLAG": True}),
    "other rows": ((4,), (X, X, X, 16, 32, 0.5), {"BLOCK": 16, "FLAG": True}),
    "one row": ((1,), (X, X, X, 1, 32, 0.25), {"BLOCK": 16, "FLAG": True}),
    "rows of 64 bits": ((1,), (X, X, X, 2**31, 32, 0.25), {"BLOCK": 16, "FLAG": True}),
    "odd stride": ((3,), (X, X, X, 5, 33, 0.5), {"BLOCK": 16, "FLAG": True}),
    "stride of one": ((3,), (X, X, X, 5, 1, 0.5), {"BLOCK": 16, "FLAG": True}),
    "stride of 64 bits": ((3,), (X, X, X, 5, 2**32, 0.5), {"BLOCK": 16, "FLAG": True}),
    "second unaligned": ((3,), (X, X[1:], X, 5, 32, 0.5), {"BLOCK": 16, "FLAG": True}),
    "third unaligned": ((3,), (X, X, X[1:], 5, 32, 0.5), {"BLOCK": 16, "FLAG": True}),
    "float32": ((3,), (X.float(), X, X, 5, 32, 0.5), {"BLOCK": 16, "FLAG": True}),
    "no other": ((3,), (X, X, None, 5, 32, 0.5), {"BLOCK": 16, "FLAG": True}),
    "other block": ((3,), (X, X, X, 5, 32, 0.5), {"BLOCK": 32, "FLAG": True}),
    "no flag": ((3,), (X, X, X, 5, 32, 0.5), {"BLOCK": 16, "FLAG": False}),
    "warps": ((3,), (X, X, X, 5, 32, 0.5), {"BLOCK": 16, "FLAG": True, "num_warps": 2}),
}


def seen(gpu: fake_cuda.FakeCuda, launch: Callable[[], object]) -> list[Any]:
    """Of one launch; tensors by their address."""
    before = len(gpu.launches)
    launch()
    ((grid, function, args),) = gpu.launches[before:]
    return [grid, function, *(a.data_ptr() if isinstance(a, torch.Tensor) else a for a in args)]


def test_every_launch_is_tritons_own(gpu: fake_cuda.FakeCuda) -> None:
    tried: Kernel = kernel(plain=("rows",))(_body)
    for grid, args, constants in VARIANTS.values():  # all before any is launched again
        tried[grid](*args, **constants)
    for name, (grid, args, constants) in VARIANTS.items():
        found = seen(gpu, lambda g=grid, a=args, c=constants: tried[g](*a, **c))
        expected = seen(gpu, lambda g=grid, a=args, c=constants: tried.jit[g](*a, **c))
        assert found == expected, name
    functions = {function for _, function, _ in gpu.launches}
    # Triton's own number: three of the variants are served by the build of another.
    assert len(functions) == tried.num_builds == len(VARIANTS) - 3


def test_numbers_that_make_no_difference_are_one_key(gpu: fake_cuda.FakeCuda) -> None:
    tried: Kernel = kernel(plain=("rows",))(_body)
    for rows in range(1, 100):
        tried[(rows,)](X, X, X, rows, 32, rows / 2, BLOCK=16, FLAG=True)
    assert len(tried._built) == 1 and len(gpu.launches) == 99
    assert {args[3] for _, _, args in gpu.launches} == set(range(1, 100))


def test_sizes() -> None:
    for n in range(1, 300):
        assert cdiv(n, 7) == -(n // -7) == (n + 6) // 7
        power = next_power_of_2(n)
        assert power >= n > power / 2 and power.bit_count() == 1
