"""Linear layers by own kernels, as operators that torch.compile does not trace into.

Steps of few rows take the kernel of linear_triton.py where it was faster on an H200, others cuBLAS.
Which is decided when the operator runs: compiled code serves every number of rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.kernels import Kernels

MAX_ROWS = 64
"""Above it arithmetic begins to count, and cuBLAS's larger tiles win."""
FEW_ROWS, MANY_COLUMNS = 16, 4096
"""Several rows without the activation pay up to so many, and for so many columns: 8 rows by
4096x12288 took 27.6 us on an H200 (cuBLAS 29.8), 16 rows by 1024x3072 7.8 (7.0), 32 rows by
4096x4096 13.0 (12.9). One row took 0.25 to 0.93 times as long as by cuBLAS, up to 64 with the
activation 0.77 to 0.98 times as long as the two kernels (each in its fastest tile)."""
ROWS_BUILT = (1, 16, 32, MAX_ROWS, MAX_ROWS + 1)
"""One of each kernel that steps of any size take."""

library = torch.library.Library("rangefinder", "FRAGMENT")
library.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
library.define("gated_linear(Tensor x, Tensor weight) -> Tensor")


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, kernels: Kernels
) -> torch.Tensor:
    """F.linear(x [T, K], weight [N, K], bias [N]) by what `kernels` says."""
    if kernels.linear == "torch":
        return F.linear(x, weight, bias)
    if not torch.compiler.is_compiling():
        return _linear(x, weight, bias)
    found: torch.Tensor = torch.ops.rangefinder.linear(x, weight, bias)
    return found


def gated_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, K], weight [2I, K], gate then up -> silu(x gate^T) * (x up^T) [T, I], one kernel where
    the rows are few; else a product and the activation's own kernel, whatever `fused` says."""
    if not torch.compiler.is_compiling():
        return _gated_linear(x, weight)
    found: torch.Tensor = torch.ops.rangefinder.gated_linear(x, weight)
    return found


def linear_out(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    kernels: Kernels,
    out: torch.Tensor,
) -> torch.Tensor:
    """linear() into out [T, N]; not in compiled code."""
    if kernels.linear == "triton" and takes_own(x, weight):
        from engine.kernels.linear_triton import linear_triton

        return linear_triton(x, weight, bias, out=out)
    if bias is not None:
        return torch.addmm(bias, x, weight.t(), out=out)
    return torch.mm(x, weight.t(), out=out)


def takes_own(x: torch.Tensor, weight: torch.Tensor, gated: bool = False) -> bool:
    """Whether x [T, K] by weight [N, K] is for the own kernel."""
    rows = x.shape[0]
    if gated or rows <= 1:
        return 0 < rows <= MAX_ROWS
    return rows <= FEW_ROWS and weight.shape[0] >= MANY_COLUMNS


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if takes_own(x, weight):
        from engine.kernels.linear_triton import linear_triton

        return linear_triton(x, weight, bias)
    return F.linear(x, weight, bias)


def _gated_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    from engine.kernels.layers_triton import silu_and_mul_triton
    from engine.kernels.linear_triton import linear_triton

    if takes_own(x, weight, gated=True):
        return linear_triton(x, weight, gated=True)
    return silu_and_mul_triton(F.linear(x, weight))


library.impl("linear", _linear, "CompositeExplicitAutograd")
library.impl("gated_linear", _gated_linear, "CompositeExplicitAutograd")
torch.library.register_fake(
    "rangefinder::linear",
    lambda x, weight, bias: x.new_empty(x.shape[0], weight.shape[0]),
    lib=library,
)
torch.library.register_fake(
    "rangefinder::gated_linear",
    lambda x, weight: x.new_empty(x.shape[0], weight.shape[0] // 2),
    lib=library,
)
