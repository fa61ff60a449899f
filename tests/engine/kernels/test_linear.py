"""Products of few rows in Triton's interpreter: against float64, and whole models."""

from __future__ import annotations

import random

import pytest
import torch

from engine import layers
from engine.kernels import Kernels
from engine.kernels import linear as linears
from engine.models import qwen
from tests.support.checkpoints import Checkpoints, reference_logits
from tests.support.interpreter import require_interpreter
from tests.support.models import logits_of

require_interpreter()

ROWS = [1, 2, 16, 17, 64]
SHAPES = [(64, 256), (37, 100), (1, 1)]
"""Columns and inner size: whole tiles, parts of tiles, and least of all."""


def near(found: torch.Tensor, exact: torch.Tensor, roundings: int) -> None:
    """Within so many roundings; 2e-6 of it may be the order of a float32 sum."""
    eps = torch.finfo(found.dtype).eps
    close = {"rtol": roundings * eps, "atol": max(eps, 2e-6)}
    torch.testing.assert_close(found.double(), exact, **close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("size", "inner"), SHAPES)
@pytest.mark.parametrize("rows", ROWS)
def test_a_product_is_rounded_once(rows: int, size: int, inner: int, dtype: torch.dtype) -> None:
    """x is a slice of a wider tensor, as Q is of a fused projection."""
    from engine.kernels.linear_triton import linear_triton

    torch.manual_seed(0)
    x = torch.randn(rows, inner + 3).to(dtype)[:, :inner] / inner**0.5
    weight, bias = torch.randn(size, inner).to(dtype), torch.randn(size).to(dtype)
    exact = x.double() @ weight.double().T
    near(linear_triton(x, weight), exact, 2)
    near(linear_triton(x, weight, bias), exact + bias.double(), 2)
    out = torch.full((rows, size + 2), 7.0, dtype=dtype)
    linear_triton(x, weight, out=out[:, :size])
    assert torch.equal(out[:, :size], linear_triton(x, weight)) and bool((out[:, size:] == 7).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("size", "inner"), SHAPES)
@pytest.mark.parametrize("rows", ROWS)
def test_gate_and_up_are_activated_in_the_same_kernel(
    rows: int, size: int, inner: int, dtype: torch.dtype
) -> None:
    """Bit for bit the activation of the product, which rounds gate, up and silu(gate)."""
    from engine.kernels.linear_triton import linear_triton

    torch.manual_seed(0)
    x = torch.randn(rows, inner).to(dtype) / inner**0.5
    weight = torch.randn(2 * size, inner).to(dtype)
    found = linear_triton(x, weight, gated=True)
    gate, up = (x.double() @ weight.double().T).split(size, dim=1)
    near(found, gate * gate.sigmoid() * up, 4)
    chosen = linear_triton(x, weight)
    torch.testing.assert_close(found, layers.SiluAndMul()(chosen), rtol=2**-7, atol=2**-8)


def test_rows_of_padding_are_whatever_but_change_no_other() -> None:
    from engine.kernels.linear_triton import linear_triton

    torch.manual_seed(0)
    x, weight = torch.randn(8, 96).bfloat16(), torch.randn(48, 96).bfloat16()
    expected = linear_triton(x, weight)
    x[5:] = float("nan")
    assert torch.equal(linear_triton(x, weight)[:5], expected[:5])


def test_models_are_transformers(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of few rows and, where 4 is the limit, of many; over pages full of NaN."""
    for module in (layers, qwen):
        monkeypatch.setattr(module, "runs_triton", lambda x: True)
    path, rng = checkpoints(num_layers=2), random.Random(1)
    sequences = [[rng.randrange(90) for _ in range(n)] for n in (6, 4)]
    steps = [{0: 3, 1: 3}, {1: 1, 0: 2}, {0: 1}]
    for limit in (64, 4):
        monkeypatch.setattr(linears, "MAX_ROWS", limit)
        found = logits_of(path, sequences, steps, padding=2, kernels=Kernels(linear="triton"))
        for ids, logits in zip(sequences, found, strict=True):
            torch.testing.assert_close(logits, reference_logits(path, ids), atol=1e-4, rtol=0)


def test_the_operator_takes_the_kernel_for_few_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.kernels import linear_triton

    asked: list[int] = []
    own = linear_triton.linear_triton

    def counted(x: torch.Tensor, *args: object, **options: object) -> torch.Tensor:
        asked.append(x.shape[0])
        return own(x, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(linear_triton, "linear_triton", counted)
    torch.manual_seed(0)
    close = {"rtol": 1e-4, "atol": 1e-5, "check_dtype": False}
    monkeypatch.setattr(linears, "MANY_COLUMNS", 32)
    weight, bias = torch.randn(32, 16), torch.randn(32)
    narrow = torch.randn(31, 16)
    for rows in (0, 1, 16, 17, 64, 65):
        x = torch.randn(rows, 16)
        exact = x.double() @ weight.double().T
        kernels = Kernels(linear="triton")
        torch.testing.assert_close(
            linears.linear(x, weight, bias, kernels), exact + bias.double(), **close
        )
        out = torch.empty(rows, 32)
        torch.testing.assert_close(
            linears.linear_out(x, weight, None, kernels, out), exact, **close
        )
        gate, up = exact.chunk(2, dim=1)
        found = linears.gated_linear(x, weight)
        torch.testing.assert_close(found, gate * gate.sigmoid() * up, **close)
        linears.linear(x, narrow, None, kernels)
    assert asked == [1] * 4 + [16] * 3 + [17, 64]


@pytest.mark.parametrize("rows", [1, 65])
def test_the_operators_say_what_they_return(rows: int) -> None:
    """Schemas, and under torch.compile shapes, dtypes and strides as the kernels give them."""
    x, weight = torch.randn(rows, 16).bfloat16(), torch.randn(32, 16).bfloat16()
    ops, utils = torch.ops.rangefinder, ("test_schema", "test_faketensor")
    torch.library.opcheck(
        ops.linear.default, (x, weight, torch.randn(32).bfloat16()), test_utils=utils
    )
    torch.library.opcheck(ops.linear.default, (x, weight, None), test_utils=utils)
    torch.library.opcheck(ops.gated_linear.default, (x, weight), test_utils=utils)
