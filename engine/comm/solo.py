"""One rank alone: every collective is the identity, so layers need no `if world > 1`."""

from __future__ import annotations

import torch

from engine.comm.base import Communicator
from engine.comm.types import Site


class SoloCommunicator(Communicator):
    """World of size 1: issues no operator, and no observer hears a collective.

    Attributes:
        cache_dir: where this engine's compile caches lie, None: nothing of its own. The registry
            is how engines of one process see each other's.
    """

    path = "solo"

    def __init__(self, cache_dir: str | None = None) -> None:
        super().__init__(rank=0, world=1)
        self.cache_dir = cache_dir

    def all_reduce(self, x: torch.Tensor, site: Site) -> torch.Tensor:
        return x

    def gather(self, x: torch.Tensor, site: Site) -> torch.Tensor | None:
        return x

    def broadcast(self, x: torch.Tensor, site: Site) -> torch.Tensor:
        return x

    def _all_reduce(self, x: torch.Tensor) -> None: ...

    def _gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x.unsqueeze(0))

    def _broadcast(self, x: torch.Tensor) -> None: ...

    def barrier(self) -> None: ...
