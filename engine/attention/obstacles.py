"""Why an attention backend cannot run on a machine and a model."""

from __future__ import annotations

import importlib.metadata
import importlib.util

from engine.attention import flash, flash4, triton_paged


def flash2_obstacle(page_size: int | None, head_dim: int, dtype: str) -> str | None:
    """Why flash-attn 2 cannot run on a GPU, None if it can."""
    found = importlib.util.find_spec("flash_attn")
    if found is None or found.origin is None:  # flash-attn-4 alone is a folder without a module
        return "the package flash-attn is not installed; pip install flash-attn"
    return _flash_shape_obstacle(page_size, head_dim, dtype, flash.PAGE_MULTIPLE)


def _flash_shape_obstacle(
    page_size: int | None, head_dim: int, dtype: str, multiple: int
) -> str | None:
    if dtype == "float32":
        return "it has no float32 kernels; set dtype=bfloat16 or float16"
    if page_size is not None and page_size % multiple:
        return f"page_size={page_size}: its pages are multiples of {multiple}"
    if head_dim > 256 or head_dim % 8:
        return f"head_dim={head_dim}: it takes multiples of 8 up to 256"
    return None


def flash4_obstacle(
    page_size: int | None, head_dim: int, dtype: str, capability: tuple[int, int] | None
) -> str | None:
    """Why attention=flash4 cannot run on a GPU of this compute capability (None: not known), None
    if it can."""
    if not _installed("flash-attn-4"):
        return (
            "the package flash-attn-4 is not installed; pip install 'flash-attn-4[cu13]==4.0.0b36'"
        )
    if capability is not None and capability[0] not in flash4.MAJORS:
        majors = ", ".join(f"{major}.x" for major in flash4.MAJORS)
        return (
            f"this GPU has compute capability {'.'.join(map(str, capability))}: it needs {majors}"
        )
    if capability is not None and capability[0] > 9 and head_dim > 128 and head_dim != 256:
        return f"head_dim={head_dim}: on this GPU it takes up to 128, and 256"
    shape = _flash_shape_obstacle(page_size, head_dim, dtype, flash4.PAGE_MULTIPLE)
    return shape or triton_obstacle(head_dim)


def _installed(distribution: str) -> bool:
    try:
        return bool(importlib.metadata.version(distribution))
    except importlib.metadata.PackageNotFoundError:
        return False


def triton_obstacle(head_dim: int) -> str | None:
    """Why attention=triton cannot run on a GPU, None if it can."""
    if head_dim > triton_paged.MAX_HEAD_DIM:
        return f"head_dim={head_dim}: it takes up to {triton_paged.MAX_HEAD_DIM}"
    return None
