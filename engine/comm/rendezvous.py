"""Where the ranks of an engine meet, and processes that torchrun started find their caller."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from engine.errors import ConfigError

LOOPBACK = "127.0.0.1"


class Rendezvous:
    """A key-value store in the caller's process, on a port of one address that the system chose and
    that is bound before any rank starts, so that no two engines can meet at one port and nothing is
    left on disk.

    Attributes:
        host, port: for `connect`.
    """

    def __init__(self, host: str = LOOPBACK) -> None:
        listener = socket.create_server((host, 0))
        self.host = host
        self.port: int = listener.getsockname()[1]
        self._store: dist.TCPStore | None = dist.TCPStore(
            host,
            self.port,
            is_master=True,
            wait_for_workers=False,
            # The store takes the socket over; by itself it would listen on every interface.
            master_listen_fd=listener.detach(),
        )

    def close(self) -> None:
        """Ends the store; ranks that still look for each other then fail. Repeatable."""
        self._store = None


def connect(port: int, timeout_s: float, host: str = LOOPBACK) -> dist.Store:
    """A rank's view of the store."""
    return dist.TCPStore(host, port, timeout=timedelta(seconds=timeout_s))


@dataclass(frozen=True)
class LaunchedBy:
    """What torchrun says to each process that it starts.

    Attributes:
        rank, world: of the process among all nodes'.
        local_rank, local_world: among those of its node.
        host: the address at which they meet.
        port: of torchrun's store there.
        kept: torchrun keeps the store; else the process of rank 0 has to.
        attempt: how often torchrun has started all processes anew; the store outlives them.
    """

    rank: int
    world: int
    local_rank: int
    local_world: int
    host: str
    port: int
    kept: bool
    attempt: str

    @classmethod
    def torchrun(cls) -> LaunchedBy:
        """Raises ConfigError: torchrun did not start this process."""
        try:
            numbers = [
                int(os.environ[name])
                for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
            ]
            host = socket.gethostbyname(os.environ["MASTER_ADDR"])
        except (KeyError, ValueError, OSError) as error:
            raise ConfigError(
                f"ranks='torchrun': {error} (of RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, "
                "MASTER_ADDR, MASTER_PORT); start the script by torchrun, or leave ranks='spawn'"
            ) from error
        kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        rank, world, local_rank, local_world, port = numbers
        return cls(rank, world, local_rank, local_world, host, port, kept, attempt)


class Board:
    """Offers of engines, numbered from 1, in torchrun's store; an empty one is the last.

    Args:
        keep: for as long as this lives it is the store, unless torchrun keeps one.
    """

    def __init__(self, me: LaunchedBy, keep: bool = False) -> None:
        self._store = dist.TCPStore(
            me.host, me.port, is_master=keep and not me.kept, wait_for_workers=False
        )
        self._name = f"rangefinder/{me.attempt}"

    def offer(self, text: str) -> None:
        number = self._store.add(f"{self._name}/count", 1)
        self._store.set(f"{self._name}/engine{number}", text)

    def read(self, number: int) -> str:
        """Waits for the offer of this number, for days if need be."""
        key = f"{self._name}/engine{number}"
        self._store.wait([key], timedelta(days=30))
        return str(self._store.get(key).decode())
