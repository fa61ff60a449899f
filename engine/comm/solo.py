"""One rank alone: every collective is the identity, so layers need no `if world > 1`."""

from __future__ import annotations

import torch

from engine.comm.base import Communicator
from engine.comm.types import Site


class SoloCommunicator(Communicator):
    """World of size 1: issues no operator, and no observer hears a collective."""

    path = "solo"

    def __init__(self) -> None:
        super().__init__(rank=0, world=1)

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
