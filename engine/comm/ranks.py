"""Which communicator a rank of several gets, by the name that `resolve` decided on."""

from __future__ import annotations

from engine.comm.fused import FusedCommunicator
from engine.comm.process_group import ProcessGroupCommunicator
from engine.comm.rendezvous import LOOPBACK
from engine.comm.symmetric import SymmetricCommunicator


def connect_rank(
    rank: int,
    world: int,
    comm: str,
    port: int,
    timeout_s: float = 300.0,
    host: str = LOOPBACK,
) -> ProcessGroupCommunicator:
    """`comm`: gloo, nccl, symm_mem or symm_fused. With all but the first the rank's GPU is the
    current one.

    Raises:
        ConfigError: symm_mem or symm_fused, and the GPUs cannot share memory.
    """
    if comm == "symm_fused":
        return FusedCommunicator(rank, world, port, timeout_s, host)
    if comm == "symm_mem":
        return SymmetricCommunicator(rank, world, port, timeout_s, host)
    return ProcessGroupCommunicator(rank, world, comm, port, timeout_s, host)
