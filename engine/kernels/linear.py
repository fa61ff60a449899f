"""Linear layers by own kernels, as operators that torch.compile does not trace into.

Steps of few rows take the kernel of linear_triton.py, others cuBLAS. Which is decided when the
operator runs: compiled code serves every number of rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.kernels import Kernels

MAX_ROWS = 64
"""Above it arithmetic begins to count, and cuBLAS's larger tiles win."""
ROWS_BUILT = (1, 16, 32, MAX_ROWS, MAX_ROWS + 1)
"""One of each kernel that steps of any size take."""

library = torch.library.Library("rangefinder", "FRAGMENT")
library.define("linear(Tensor x, Tensor weight, Tensor? bias, bool dependent) -> Tensor")
library.define("gated_linear(Tensor x, Tensor weight, bool dependent) -> Tensor")


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, kernels: Kernels
) -> torch.Tensor:
    """F.linear(x [T, K], weight [N, K], bias [N]) by what `kernels` says."""
    if kernels.linear == "torch":
        return F.linear(x, weight, bias)
    found: torch.Tensor = torch.ops.rangefinder.linear(x, weight, bias, kernels.dependent)
    return found


def gated_linear(x: torch.Tensor, weight: torch.Tensor, kernels: Kernels) -> torch.Tensor:
    """x [T, K], weight [2I, K], gate then up -> silu(x gate^T) * (x up^T) [T, I], one kernel where
    the rows are few; else a product and the activation's own kernel, whatever `fused` says."""
    found: torch.Tensor = torch.ops.rangefinder.gated_linear(x, weight, kernels.dependent)
    return found


def linear_out(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    kernels: Kernels,
    out: torch.Tensor,
) -> torch.Tensor:
    """linear() into out [T, N]; not in compiled code."""
    if kernels.linear == "triton" and _few(x):
        from engine.kernels.linear_triton import linear_triton

        return linear_triton(x, weight, bias, dependent=kernels.dependent, out=out)
    if bias is not None:
        return torch.addmm(bias, x, weight.t(), out=out)
    return torch.mm(x, weight.t(), out=out)


def _few(x: torch.Tensor) -> bool:
    return 0 < x.shape[0] <= MAX_ROWS


def _linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dependent: bool
) -> torch.Tensor:
    if _few(x):
        from engine.kernels.linear_triton import linear_triton

        return linear_triton(x, weight, bias, dependent=dependent)
    return F.linear(x, weight, bias)


def _gated_linear(x: torch.Tensor, weight: torch.Tensor, dependent: bool) -> torch.Tensor:
    from engine.kernels.layers_triton import silu_and_mul_triton
    from engine.kernels.linear_triton import linear_triton

    if _few(x):
        return linear_triton(x, weight, gated=True, dependent=dependent)
    return silu_and_mul_triton(F.linear(x, weight), dependent)


library.impl("linear", _linear, "CompositeExplicitAutograd")
library.impl("gated_linear", _gated_linear, "CompositeExplicitAutograd")
torch.library.register_fake(
    "rangefinder::linear",
    lambda x, weight, bias, dependent: x.new_empty(x.shape[0], weight.shape[0]),
    lib=library,
)
torch.library.register_fake(
    "rangefinder::gated_linear",
    lambda x, weight, dependent: x.new_empty(x.shape[0], weight.shape[0] // 2),
    lib=library,
)
