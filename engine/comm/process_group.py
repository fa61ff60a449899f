"""A communicator over one torch.distributed process group: NCCL on GPUs, gloo on CPUs."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from engine.comm.base import Communicator
from engine.comm.rendezvous import LOOPBACK, connect


class ProcessGroupCommunicator(Communicator):
    """Ranks meet through the store at `host` and `port` (comm/rendezvous.py). With NCCL each rank's
    GPU is the current one.

    Raises whatever torch.distributed raises when a peer does not come within `timeout_s`.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        backend: str,
        port: int,
        timeout_s: float = 300.0,
        host: str = LOOPBACK,
    ) -> None:
        super().__init__(rank, world, "cuda" if backend == "nccl" else "cpu")
        self.path = backend
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group(
            backend,
            store=connect(port, timeout_s, host),
            rank=rank,
            world_size=world,
            timeout=timeout,
            # Connects NCCL now rather than at the first collective, and names the barrier's GPU.
            device_id=(
                torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else None
            ),
        )

    def _all_reduce(self, x: torch.Tensor) -> None:
        dist.all_reduce(x)

    def _gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        dist.gather(x, list(out.unbind(0)) if self.rank == 0 else None, dst=0)

    def _broadcast(self, x: torch.Tensor) -> None:
        dist.broadcast(x, src=0)

    def min_over_ranks(self, value: int) -> int:
        """The smallest of the ranks' values, on every rank (start-up only; not observed)."""
        box = torch.tensor([value], dtype=torch.int64, device=self._align_buffer.device)
        dist.all_reduce(box, op=dist.ReduceOp.MIN)
        return int(box.item())

    def barrier(self) -> None:
        dist.barrier()

    def close(self) -> None:
        super().close()
        if dist.is_initialized():
            dist.destroy_process_group()
