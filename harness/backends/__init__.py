"""The engines that can be measured, by name."""

from __future__ import annotations

from harness.backends.base import Backend
from harness.settings.config import CHOICES

NAMES = CHOICES["backend"]


def create(name: str = "native") -> Backend:
    """A backend that has not been started.

    Raises:
        ValueError: no such backend.
    """
    if name == "native":
        from harness.backends.native import NativeBackend

        return NativeBackend()
    if name == "transformers":
        from harness.backends.transformers import TransformersBackend

        return TransformersBackend()
    if name == "nanovllm":
        from harness.backends.nanovllm import NanoVllmBackend

        return NanoVllmBackend()
    if name == "vllm":
        from harness.backends.vllm import VllmBackend

        return VllmBackend()
    raise ValueError(f"backend={name!r}: choose one of {', '.join(NAMES)}")


__all__ = ["NAMES", "Backend", "create"]
