"""Where the ranks of one engine meet: a store that lives in the caller's process."""

from __future__ import annotations

import socket
from datetime import timedelta

import torch.distributed as dist


class Rendezvous:
    """A key-value store on a loopback port that the system chose and that is bound before any rank
    starts, so that no two engines can meet at one port and nothing is left on disk.

    Attributes:
        port: for `connect`.
    """

    def __init__(self) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = listener.getsockname()[1]
        self._store: dist.TCPStore | None = dist.TCPStore(
            "127.0.0.1",
            self.port,
            is_master=True,
            wait_for_workers=False,
            # The store takes the socket over; by itself it would listen on every interface.
            master_listen_fd=listener.detach(),
        )

    def close(self) -> None:
        """Ends the store; ranks that still look for each other then fail. Repeatable."""
        self._store = None


def connect(port: int, timeout_s: float) -> dist.Store:
    """A rank's view of the store."""
    return dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=timeout_s))
