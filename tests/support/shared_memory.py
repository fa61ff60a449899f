"""Symmetric memory of ranks that are processes on one CPU: same calls as on GPUs, checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.synchronize import Barrier
from typing import Any

import torch


@dataclass
class Buffers:
    """What the ranks inherit: a buffer of each, and where they meet."""

    bytes: list[torch.Tensor]
    barrier: Any

    @classmethod
    def of(cls, world: int, nbytes: int, barrier: Barrier) -> Buffers:
        held = [torch.zeros(nbytes, dtype=torch.uint8).share_memory_() for _ in range(world)]
        return cls(held, barrier)


@dataclass
class FakeShared:
    """Shared (engine/comm/symmetric_memory.py) on one rank. `calls` names what was enqueued, with
    its bytes. Sums are rounded after each addition, in the order of the ranks, as torch's are."""

    buffers: Buffers
    rank: int
    calls: list[tuple[str, int]] = field(default_factory=list)

    def buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        own = self.buffers.bytes[self.rank]
        assert numel * dtype.itemsize <= len(own), "past the buffer's end"
        return own[: numel * dtype.itemsize].view(dtype)

    def one_shot(self, buffer: torch.Tensor, out: torch.Tensor) -> None:
        self._begin("one_shot", buffer, out)
        out.copy_(self._sum(self._all(buffer)))
        self.buffers.barrier.wait()

    def two_shot(self, buffer: torch.Tensor, out: torch.Tensor) -> None:
        self._begin("two_shot", buffer, out)
        everyone = self._all(buffer)
        world = len(everyone)
        parts = [whole.tensor_split(world) for whole in everyone]
        total = self._sum([own[self.rank] for own in parts])
        self.buffers.barrier.wait()
        parts[self.rank][self.rank].copy_(total)
        self.buffers.barrier.wait()
        out.copy_(torch.cat([parts[rank][rank] for rank in range(world)]))
        self.buffers.barrier.wait()

    def _begin(self, name: str, buffer: torch.Tensor, out: torch.Tensor) -> None:
        own = self.buffers.bytes[self.rank]
        assert buffer.data_ptr() == own.data_ptr() and buffer.storage_offset() == 0
        assert buffer.shape == out.shape and buffer.ndim == 1 and buffer.dtype == out.dtype
        assert out.is_contiguous() and out.data_ptr() % 16 == 0 and out.nbytes % 16 == 0
        assert out.untyped_storage().data_ptr() != own.untyped_storage().data_ptr()
        assert out.dtype in (torch.bfloat16, torch.float32)
        self.calls.append((name, out.nbytes))
        self.buffers.barrier.wait()

    def _all(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        return [other[: buffer.nbytes].view(buffer.dtype) for other in self.buffers.bytes]

    def _sum(self, parts: list[torch.Tensor]) -> torch.Tensor:
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total


def share_of(buffers: Buffers) -> Callable[[int, int, int], FakeShared]:
    """What SymmetricCommunicator builds its memory by."""

    def share(nbytes: int, world: int, rank: int) -> FakeShared:
        assert world == len(buffers.bytes) and nbytes <= len(buffers.bytes[rank])
        return FakeShared(buffers, rank)

    return share


@dataclass
class FakeSides:
    """SharedSides on one rank, of two sides of `nbytes` and `max_rows` rows: as SymmetricSides lays
    them out, in memory that the ranks' processes share."""

    memory: list[torch.Tensor]
    nbytes: int
    max_rows: int
    rank: int

    def __post_init__(self) -> None:
        bases = torch.tensor([held.data_ptr() for held in self.memory])
        self.parts = [bases, bases + self.nbytes]
        self.flags = bases + 2 * self.nbytes
        self.epochs = torch.zeros(self.max_rows, dtype=torch.int32)

    def side(self, turn: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        nbytes = numel * dtype.itemsize
        assert nbytes <= self.nbytes, "past the side's end"
        return self.memory[self.rank][turn * self.nbytes :][:nbytes].view(dtype)

    def reduce_add_norm(
        self, turn: int, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from engine.kernels.reduce_triton import reduce_add_norm_triton

        parts = self.parts[turn]
        return reduce_add_norm_triton(
            parts, self.flags, self.epochs, residual, weight, eps, self.rank
        )


def sides_of(memory: list[torch.Tensor]) -> Callable[[int, int, int, int], FakeSides]:
    """What FusedCommunicator builds its sides by."""

    def share(nbytes: int, max_rows: int, world: int, rank: int) -> FakeSides:
        assert world == len(memory) and 2 * nbytes + world * max_rows * 4 <= len(memory[rank])
        return FakeSides(memory, nbytes, max_rows, rank)

    return share
