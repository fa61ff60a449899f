"""A process group whose all-reduces go through symmetric memory, by size: one- or two-shot"""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.comm.process_group import ProcessGroupCommunicator
from engine.comm.rendezvous import LOOPBACK
from engine.comm.symmetric_memory import Shared, SymmetricMemory
from engine.comm.types import Kind, Site
from engine.kernels import USUAL, Kernels
from engine.kernels.linear import linear_out

BUFFER_BYTES = 64 << 20
"""A step of 8,192 tokens (the default budget) at hidden size 4,096 in bf16."""
ONE_SHOT_BYTES = 64 << 10
"""Two-shot takes over above it. Back to back in CUDA graphs of two H200s: 32 KiB 6.7 us one-shot,
7.1 us two-shot; 128 KiB 7.6 and 7.2; 2 MiB 18.8 and 13.0; 64 MiB 370 and 212, NCCL 267. It is a
limit on what a rank reads from its peers, which grows with their number."""
ALIGNMENT = 16
DTYPES = (torch.bfloat16, torch.float32)
_TWO_SHOT_WORLDS = (2, 4, 8)

ONE_SHOT, TWO_SHOT = "symm_one_shot", "symm_two_shot"


def path_of(nbytes: int, dtype: torch.dtype, world: int) -> str | None:
    """The path of an all-reduce of so many bytes; None: the process group's own.

    That is: more than the buffer holds; a dtype that torch's kernels do not sum (they know bf16 and
    float32); what is no multiple of 16 bytes, their widest load; and above the one-shot limit a
    number of ranks that two-shot is not built for (2, 4 and 8).
    """
    if nbytes > BUFFER_BYTES or nbytes == 0 or nbytes % ALIGNMENT or dtype not in DTYPES:
        return None
    if nbytes * (world - 1) <= ONE_SHOT_BYTES:
        return ONE_SHOT
    return TWO_SHOT if world in _TWO_SHOT_WORLDS else None


class SymmetricCommunicator(ProcessGroupCommunicator):
    """Everything but the all-reduces that `path_of` takes is the process group's.

    In a step that torch does not compile, a row-parallel product is written into the buffer by its
    matmul and its sum goes to ordinary memory: nothing is copied. Any other tensor is copied into
    the buffer and its sum comes back in one kernel. (torch's one_shot_all_reduce_copy_out would
    copy and sum in one; but in its kernel's source, one_shot_all_reduce_kernel, no barrier of the
    block stands between the copy and the signal that its first threads give, so that a peer may
    read what the other threads have yet to write.)

    Sums are rounded after each addition, in the order of the ranks: of two ranks as NCCL's.
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
    ) -> None:
        super().__init__(rank, world, backend, port, timeout_s, host)
        # Here, so that it is there before anything is measured or captured.
        self._shared: Shared | None = share(BUFFER_BYTES, world, rank)
        self._staged: torch.Tensor | None = None

    # -- summands that are computed where their peers read them -----------------------------------

    def partial_linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        kernels: Kernels = USUAL,
    ) -> torch.Tensor:
        rows, size = x.shape[0], weight.shape[0]
        nbytes = rows * size * x.dtype.itemsize
        if torch.compiler.is_compiling() or path_of(nbytes, x.dtype, self.world) is None:
            return super().partial_linear(x, weight, bias, kernels)
        assert self._shared is not None
        self._staged = self._shared.buffer(rows * size, x.dtype).view(rows, size)
        return linear_out(x, weight, bias if self.rank == 0 else None, kernels, self._staged)

    def all_reduce(self, x: torch.Tensor, site: Site) -> torch.Tensor:
        if torch.compiler.is_compiling() or x is not self._staged:
            return super().all_reduce(x, site)
        out, self._staged = torch.empty_like(x), None
        if self._observers:
            self._observed(Kind.ALL_REDUCE, int(site), x, x.nbytes, lambda: self._sum(x, out))
        else:
            self._sum(x, out)
        return out

    # -- what the process group does, but for sums ------------------------------------------------

    def _all_reduce(self, x: torch.Tensor) -> None:
        if path_of(x.nbytes, x.dtype, self.world) is None:
            super()._all_reduce(x)
            return
        assert self._shared is not None and x.data_ptr() % ALIGNMENT == 0
        buffer = self._shared.buffer(x.numel(), x.dtype)
        buffer.copy_(x.view(-1))
        self._sum(buffer, x)

    def _sum(self, buffer: torch.Tensor, out: torch.Tensor) -> None:
        """What every rank has in its buffer, into out; both of as many elements."""
        assert self._shared is not None
        one_shot = path_of(out.nbytes, out.dtype, self.world) == ONE_SHOT
        run = self._shared.one_shot if one_shot else self._shared.two_shot
        run(buffer.view(-1), out.view(-1))

    def _path_of(self, kind: Kind, x: torch.Tensor) -> str:
        own = path_of(x.nbytes, x.dtype, self.world) if kind is Kind.ALL_REDUCE else None
        return own or super()._path_of(kind, x)

    def close(self) -> None:
        self._shared = self._staged = None  # before the group that it was shared in
        super().close()
