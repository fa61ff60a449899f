"""A process that measures by turns with another one: scripts/gate.py says whose turn it is."""

from __future__ import annotations

import socket


class Turns:
    """This process's end of a socket, by the file descriptor that it inherited.

    A line with the benchmark's name says that the round before is over and the next one is ready; a
    byte comes back when it may begin. Two commits speak this to one script, so it stays as it is.
    """

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)

    def wait(self, name: str) -> None:
        self._socket.sendall(f"{name}\n".encode())
        if not self._socket.recv(1):
            raise EOFError("whoever says whose turn it is has ended")
