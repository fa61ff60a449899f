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

_OVER = "sums over memory that the GPUs share (comm=symm_fused, symm_mem)"
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

    Attributes:
        bytes: this rank's, [nbytes] uint8.

    Raises:
        ConfigError: a GPU cannot reach another's memory, or torch has no such memory here.
    """

    def __init__(self, nbytes: int, world: int, rank: int) -> None:
        own = torch.cuda.current_device()
        self._world = world
        _check_peers(own, rank, world)
        # Read when memory is shared: torch would bind multicast objects to it, which nothing uses.
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        try:
            from torch.distributed import _symmetric_memory as symm_mem

            ops = torch.ops.symm_mem
            self._one_shot = ops.one_shot_all_reduce_out.default
            self._two_shot = ops.two_shot_all_reduce_out.default
            self.bytes = symm_mem.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda", own))
            assert dist.group.WORLD is not None
            self._group = dist.group.WORLD.group_name
            # The operators find it again by the tensor's storage; nothing is exchanged later.
            self._handle = symm_mem.rendezvous(self.bytes, self._group)
        except (ImportError, AttributeError, RuntimeError) as error:
            raise ConfigError(
                f"{_OVER}: torch {torch.__version__} cannot share {nbytes} bytes among "
                f"{world} GPUs: {error}; {_INSTEAD}"
            ) from error

    def buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self.bytes[: numel * dtype.itemsize].view(dtype)

    def addresses(self) -> list[int]:
        """Of each rank's memory, as this GPU reaches it."""
        size = (self.bytes.numel(),)
        return [
            self._handle.get_buffer(rank, size, torch.uint8).data_ptr()
            for rank in range(self._world)
        ]

    def one_shot(self, buffer: torch.Tensor, out: torch.Tensor) -> None:
        self._one_shot(buffer, "sum", self._group, out)

    def two_shot(self, buffer: torch.Tensor, out: torch.Tensor) -> None:
        self._two_shot(buffer, "sum", self._group, out)


class SharedSides(Protocol):
    """What FusedCommunicator sums with: memory of two sides on each rank."""

    def side(self, turn: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The first elements of this rank's side 0 or 1, [numel]; always the same memory."""

    def reduce_add_norm(
        self, turn: int, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """kernels.reduce_triton.reduce_add_norm_triton of what stands in every rank's side."""


class SymmetricSides:
    """SharedSides of `nbytes` a side, for sums of up to `max_rows` rows; every rank must build it,
    and wait for the others before it sums.

    Raises:
        ConfigError: as SymmetricMemory.
    """

    def __init__(self, nbytes: int, max_rows: int, world: int, rank: int) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        signals = world * max_rows * 4
        memory = SymmetricMemory(2 * nbytes + signals, world, rank)
        self._rank = rank
        self._bytes = memory.bytes
        self._bytes.zero_()
        self._ends = (nbytes, 2 * nbytes)
        bases = memory.addresses()
        at = torch.tensor([0, nbytes, 2 * nbytes])
        # [2, world] and [world]: where each rank's sides and signals begin
        *sides, self._flags = (at[:, None] + torch.tensor(bases)).to(device)
        self._parts = sides
        self._epochs = torch.zeros(max_rows, dtype=torch.int32, device=device)
        torch.cuda.synchronize(device)

    def side(self, turn: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        end = self._ends[turn]
        begin = end - self._ends[0]
        assert numel * dtype.itemsize <= self._ends[0]
        return self._bytes[begin : begin + numel * dtype.itemsize].view(dtype)

    def reduce_add_norm(
        self, turn: int, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from engine.kernels.reduce_triton import reduce_add_norm_triton

        parts, epochs = self._parts[turn], self._epochs
        return reduce_add_norm_triton(parts, self._flags, epochs, residual, weight, eps, self._rank)


def _check_peers(own: int, rank: int, world: int) -> None:
    """Rank r has GPU own - rank + r."""
    for peer in range(own - rank, own - rank + world):
        if peer != own and not torch.cuda.can_device_access_peer(own, peer):
            raise ConfigError(
                f"{_OVER}: GPU {own} cannot reach the memory of GPU {peer} (no P2P; see "
                f"nvidia-smi topo -p2p r); {_INSTEAD}"
            )
