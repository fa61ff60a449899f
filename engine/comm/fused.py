"""Symmetric memory, and a sum that is added to a residual and normed as one kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from engine.comm.base import AddNorm
from engine.comm.rendezvous import LOOPBACK
from engine.comm.symmetric import ALIGNMENT, DTYPES, SymmetricCommunicator
from engine.comm.symmetric_memory import Shared, SharedSides, SymmetricMemory, SymmetricSides
from engine.comm.types import Kind, Site, StepInfo
from engine.kernels import USUAL, Kernels
from engine.kernels.linear import linear_out

SIDE_BYTES = 8 << 20
"""1,024 rows of hidden size 4,096 in bf16: what each rank reads from its peers in one sum, which
grows with their number; larger sums are bound by bandwidth, and two-shot moves less."""
MAX_ROWS = 1024
FUSED = "symm_fused"


def most_rows(size: int, dtype: torch.dtype, world: int) -> int:
    """Rows of the largest sum of summands [rows, size] that the one kernel takes; 0: it takes none,
    since it does not sum the dtype or a row is no multiple of 16 bytes."""
    if size * dtype.itemsize % ALIGNMENT or dtype not in DTYPES:
        return 0
    return min(MAX_ROWS, SIDE_BYTES // ((world - 1) * size * dtype.itemsize))


class FusedCommunicator(SymmetricCommunicator):
    """A row-parallel product goes to one of two sides in turn, where the peers read it while this
    rank goes on to write the other (kernels/reduce_triton.py). Sums that no norm follows, larger
    ones and those of compiled code are SymmetricCommunicator's.

    A step makes an even number of such sums, two a layer, so that it begins with the first side
    however many were made before: what a CUDA graph holds fits behind any other step.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        port: int,
        timeout_s: float = 300.0,
        host: str = LOOPBACK,
        *,
        backend: str = "nccl",
        share: Callable[[int, int, int], Shared] = SymmetricMemory,
        share_sides: Callable[[int, int, int, int], SharedSides] = SymmetricSides,
    ) -> None:
        super().__init__(rank, world, port, timeout_s, host, backend=backend, share=share)
        self._sides: SharedSides | None = share_sides(SIDE_BYTES, MAX_ROWS, world, rank)
        self.barrier()  # nobody signals before all signals are zero
        self._turn = 0
        self._part: torch.Tensor | None = None

    def fits(self, rows: int, size: int, dtype: torch.dtype) -> bool:
        """Whether a sum of summands [rows, size] is for the one kernel."""
        return 0 < rows <= most_rows(size, dtype, self.world)

    def partial_linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        kernels: Kernels = USUAL,
    ) -> torch.Tensor:
        rows, size = x.shape[0], weight.shape[0]
        if torch.compiler.is_compiling() or not self.fits(rows, size, x.dtype):
            return super().partial_linear(x, weight, bias, kernels)
        assert self._sides is not None
        self._part = self._sides.side(self._turn, rows * size, x.dtype).view(rows, size)
        return linear_out(x, weight, bias if self.rank == 0 else None, kernels, self._part)

    def linear_all_reduce(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        site: Site,
        kernels: Kernels = USUAL,
    ) -> torch.Tensor:
        return self.all_reduce(super().partial_linear(x, weight, bias, kernels), site)

    def reduce_add_norm(
        self, partial: torch.Tensor, residual: torch.Tensor, norm: AddNorm, site: Site
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if torch.compiler.is_compiling() or partial is not self._part:
            return super().reduce_add_norm(partial, residual, norm, site)
        found: list[tuple[torch.Tensor, torch.Tensor]] = []

        def run() -> None:
            assert self._sides is not None
            found.append(self._sides.reduce_add_norm(self._turn, residual, norm.weight, norm.eps))

        if self._observers:
            self._observed(Kind.ALL_REDUCE, int(site), partial, partial.nbytes, run)
        else:
            run()
        self._turn, self._part = 1 - self._turn, None
        return found[0]

    def step_begin(self, step: StepInfo) -> None:
        self._begins()
        super().step_begin(step)

    @contextmanager
    def capturing(self, step: StepInfo, observed: bool) -> Iterator[None]:
        self._begins()
        with super().capturing(step, observed):
            yield

    def _begins(self) -> None:
        assert self._turn == 0, "a step of an odd number of sums"

    def _path_of(self, kind: Kind, x: torch.Tensor) -> str:
        return FUSED if x is self._part else super()._path_of(kind, x)

    def close(self) -> None:
        self._sides = self._part = None  # before the group that they were shared in
        super().close()
