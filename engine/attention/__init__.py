"""Attention over the paged cache: one operator, one file a backend."""

from engine.attention.ops import BACKENDS, Attention

__all__ = ["BACKENDS", "Attention"]
