"""The engines that can be measured, by name."""

from __future__ import annotations

from harness.backends.base import Backend

NAMES = ("native",)


def create(name: str = "native") -> Backend:
    """A backend that has not been started.

    Raises:
        ValueError: no such backend.
    """
    if name == "native":
        from harness.backends.native import NativeBackend

        return NativeBackend()
    raise ValueError(f"backend={name!r}: choose one of {', '.join(NAMES)}")


__all__ = ["NAMES", "Backend", "create"]
