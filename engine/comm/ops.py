"""Collectives as opaque, mutating library operators.

torch.compile must neither trace into a collective nor split the graph at it, and the observers must
fire at every compiled call. `Library.define/impl` gives that at about 1.5 us a call on an H200 host
(`torch.library.custom_op`: 9 to 13). Operators name their communicator by a small integer key into
the one registry of this process, as torch keeps its process groups.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from engine.comm.base import Communicator

# The engine's only module-global mutable state: live communicators by key. Keys are handed out from
# the lowest free number, so that a rank's process always starts at 0 and compile caches stay valid.
_registry: dict[int, Communicator] = {}

library = torch.library.Library("rangefinder", "DEF")
library.define("all_reduce(Tensor(a!) x, int comm, int site) -> ()")
library.define("gather(Tensor x, Tensor(a!) out, int comm, int site) -> ()")
library.define("broadcast(Tensor(a!) x, int comm, int site) -> ()")


def register(comm: Communicator) -> int:
    """Gives `comm` the lowest free key."""
    # setdefault looks and takes at once: engines may start in several threads.
    return next(k for k in itertools.count() if _registry.setdefault(k, comm) is comm)


def communicators() -> list[Communicator]:
    """Those of this process that are not closed."""
    return list(_registry.values())


def unregister(key: int) -> None:
    """Frees the key; unknown keys are ignored, so that close() can be repeated."""
    _registry.pop(key, None)


def _all_reduce(x: torch.Tensor, comm: int, site: int) -> None:
    _registry[comm].run_all_reduce(x, site)


def _gather(x: torch.Tensor, out: torch.Tensor, comm: int, site: int) -> None:
    _registry[comm].run_gather(x, out, site)


def _broadcast(x: torch.Tensor, comm: int, site: int) -> None:
    _registry[comm].run_broadcast(x, site)


for _name, _body in (("all_reduce", _all_reduce), ("gather", _gather), ("broadcast", _broadcast)):
    library.impl(_name, _body, "CompositeExplicitAutograd")
    # Under tracing nothing is returned and shapes do not change: the fake kernel does nothing.
    torch.library.register_fake(f"rangefinder::{_name}", lambda *args: None, lib=library)
