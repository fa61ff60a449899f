"""What an observer is built with, on a rank of a world of two that has no device."""

from __future__ import annotations

from engine.comm.types import ObserverContext


def context_of(rank: int, device: str = "cuda:0") -> ObserverContext:
    return ObserverContext(rank, 2, device, align=lambda: None, rehearse=lambda *of: lambda: None)
