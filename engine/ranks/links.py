"""TCP connections that behave as pipes do, between processes that hold the same key."""

from __future__ import annotations

import secrets
import socket
import struct
import time
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

_GREETING_S = 10  # how long a peer may take to prove that it knows the key
# A peer whose machine is gone shows as the end of its connection after 2 + 3 x 1 s of silence, or
# after 5 s in which what was sent is not acknowledged.
_KEEPALIVE = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 5000}


class Door:
    """Where peers connect: a port that the system chose, on one address of this machine.

    Attributes:
        host, port, key: what a peer must know. Both sides prove by HMAC that they hold the key
            (multiprocessing.connection); nothing is unpickled before.
    """

    def __init__(self, host: str) -> None:
        """Raises OSError: the host is no address of this machine."""
        self._listener = socket.create_server((host, 0), backlog=128)
        self.host = host
        self.port: int = self._listener.getsockname()[1]
        self.key = secrets.token_bytes(32)

    def accept(self, deadline: float) -> tuple[bytes, Connection]:
        """The next peer that knows the key: (what it said that it is, its connection).

        Raises:
            TimeoutError: none came before `deadline` (time.monotonic).
        """
        while True:
            self._listener.settimeout(max(0.001, deadline - time.monotonic()))
            peer, _ = self._listener.accept()
            connection = _connection(peer)
            try:
                deliver_challenge(connection, self.key)
                answer_challenge(connection, self.key)
                said = connection.recv_bytes(64)
            except (OSError, EOFError, AuthenticationError):
                connection.close()  # a stranger
                continue
            _wait_at_most(connection, 0)
            return said, connection

    def close(self) -> None:
        self._listener.close()


def dial(host: str, port: int, key: bytes, say: bytes) -> Connection:
    """A connection to a Door, which hears `say` first.

    Raises:
        OSError, EOFError, AuthenticationError: nobody there, or somebody with another key.
    """
    connection = _connection(socket.create_connection((host, port), timeout=_GREETING_S))
    try:
        answer_challenge(connection, key)
        deliver_challenge(connection, key)
        connection.send_bytes(say)
    except BaseException:
        connection.close()
        raise
    _wait_at_most(connection, 0)
    return connection


def _connection(peer: socket.socket) -> Connection:
    """The socket as a Connection, which reads for at most _GREETING_S for now."""
    peer.settimeout(None)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # a step plan must not wait
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        with suppress(AttributeError):
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    connection = Connection(peer.detach())
    _wait_at_most(connection, _GREETING_S)
    return connection


def _wait_at_most(connection: Connection, seconds: int) -> None:
    """Of reading; 0: for ever. The kernel's limit, since a Connection knows nothing of Python's."""
    own = socket.socket(fileno=connection.fileno())
    try:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))
    finally:
        own.detach()
