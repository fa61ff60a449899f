"""Memory that every GPU of a group reads and writes, and sums over it (NVLink, PCIe P2P).

The operators are torch's (torch.ops.symm_mem, torch >= 2.8): their kernels exchange signals before
and after, so that a buffer may be written again as soon as its sum is enqueued. None uses
NVLink multicast (multimem).
"""

from __future__ import annotations

import os
from typing import Protocol

import torch
import torch.distributed as dist

from engine.errors import ConfigError

_INSTEAD = "set comm=nccl"


class Shared(Protocol):
    """What SymmetricCommunicator sums with."""

    def buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The first elements of this rank's buffer, [numel]; always the same memory."""

    def one_shot(self, buffer: torch.Tensor, out: torch.Tensor) -> None:
        """Sum of every rank's `buffer` (of Shared.buffer) into this rank's out [numel], which is
        not the buffer: each rank reads all of the others'."""

    def two_shot(self, buffer: torch.Tensor, out: torch.Tensor) -> None:
        """The same: each rank sums its part of the elements, then reads the others' sums. What
        stands in the buffers is lost."""


class SymmetricMemory:
    """Shared, of `nbytes` on each GPU of the default process group; every rank must build it.

    Raises:
        ConfigError: a GPU cannot reach another's memory, or torch has no such memory here.
    """

    def __init__(self, nbytes: int, world: int, rank: int) -> None:
        own = torch.cuda.current_device()
        _check_peers(own, rank, world)
        # Read when memory is shared: torch would bind multicast objects to it, which nothing uses.
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        try:
            from torch.distributed import _symmetric_memory as symm_mem

            ops = torch.ops.symm_mem
            self._one_shot = ops.one_shot_all_reduce_out.default
            self._two_shot = ops.two_shot_all_reduce_out.default
            self._bytes = symm_mem.empty(
                nbytes, dtype=torch.uint8, device=torch.device("cuda", own)
            )
            assert dist.group.WORLD is not None
            self._group = dist.group.WORLD.group_name
            # The operators find it again by the tensor's storage; nothing is exchanged later.
            self._handle = symm_mem.rendezvous(self._bytes, self._group)
        except (ImportError, AttributeError, RuntimeError) as error:
            raise ConfigError(
                f"comm='symm_mem': torch {torch.__version__} cannot share {nbytes} bytes among "
                f"{world} GPUs: {error}; {_INSTEAD}"
            ) from error

    def buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self._bytes[: numel * dtype.itemsize].view(dtype)

    def one_shot(self, buffer: torch.Tensor, out: torch.Tensor) -> None:
        self._one_shot(buffer, "sum", self._group, out)

    def two_shot(self, buffer: torch.Tensor, out: torch.Tensor) -> None:
        self._two_shot(buffer, "sum", self._group, out)


def _check_peers(own: int, rank: int, world: int) -> None:
    """Rank r has GPU own - rank + r."""
    for peer in range(own - rank, own - rank + world):
        if peer != own and not torch.cuda.can_device_access_peer(own, peer):
            raise ConfigError(
                f"comm='symm_mem': GPU {own} cannot reach the memory of GPU {peer} (no P2P; see "
                f"nvidia-smi topo -p2p r); {_INSTEAD}"
            )
