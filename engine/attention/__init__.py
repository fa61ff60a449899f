"""Attention over the paged cache: one operator, one file a backend."""

from engine.attention.ops import BACKENDS, Attention, resolve_backend

__all__ = ["BACKENDS", "Attention", "resolve_backend"]
