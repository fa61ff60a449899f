"""Small engines on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine import LLM


def small_engine(path: Path, **options: Any) -> LLM:
    """Eager, one thread a rank, pages of 8 tokens, unless `options` say otherwise."""
    defaults: dict[str, Any] = {"enforce_eager": True, "page_size": 8, "device": "cpu"}
    return LLM(path, **{**defaults, "threads_per_rank": 1, **options})
