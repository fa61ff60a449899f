"""Kernels that are launched while the one before them still runs.

Programmatic dependent launch (CUDA programming guide, 12.3 and later; compute capability 9.0 and
above): a graph of small kernels otherwise pays each one's launch after the end of the one before.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def dependency(DEPENDENT: tl.constexpr):
    """First in a kernel: lets the next one be launched, and waits until the one before has ended,
    its writes visible. All before that one have ended too: it has waited so itself or, launched
    plainly, began after them."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()


def options(dependent: bool) -> dict[str, Any]:
    """For the launch of a kernel that begins so."""
    return {"launch_pdl": True} if dependent else {}
