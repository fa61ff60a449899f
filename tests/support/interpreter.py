"""Test modules whose kernels run in Triton's interpreter, on CPU tensors.

Triton decides at import whether it interprets, and then for everything in the process, compiled
code of torch included. So such a module runs in a process of its own, which
tests/test_interpreter.py starts; elsewhere it is skipped.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch


def require_interpreter() -> None:
    """To be called by a test module before it imports a kernel."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        reason = "needs TRITON_INTERPRET=1; tests/test_interpreter.py runs it"
        pytest.skip(reason, allow_module_level=True)
    pytest.importorskip("triton")
    from triton import language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    patch, cast, dot = interpreter._patch_lang_tensor, builder.cast_impl, builder.create_dot

    def patch_bounds(tensor: Any, *scope: Any) -> None:
        """numpy 2.4 makes an int only of an array without dimensions; triton 3.6 gives one of one
        element as a loop's bound (3.7 does as here)."""
        patch(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.squeeze())

    def cast_to_nearest(self: Any, source: Any, target: Any) -> Any:
        """A GPU rounds to nearest; triton 3.6 and 3.7 cut bits off where the target is bf16."""
        if source.dtype.scalar != tl.float32 or target.scalar != tl.bfloat16:
            return cast(self, source, target)
        rounded = torch.from_numpy(source.data.copy()).bfloat16().view(torch.uint16)
        return interpreter.TensorHandle(rounded.numpy(), tl.bfloat16)

    def dot_of_values(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        """bf16 is held as its 16 bits, which triton 3.6 and 3.7 multiply as integers."""
        a, b = (cast(self, x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return dot(self, a, b, *rest)

    interpreter._patch_lang_tensor = patch_bounds
    builder.cast_impl = cast_to_nearest
    builder.create_dot = dot_of_values
