"""Small engines on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SMALL: dict[str, Any] = {
    "enforce_eager": True,
    "page_size": 8,
    "device": "cpu",
    "threads_per_rank": 1,
    "max_num_seqs": 4,
}


def engine(path: Path, **options: Any) -> Any:
    from engine import LLM

    return LLM(path, **{**SMALL, **options})
