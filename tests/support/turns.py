"""Two processes that measure by turns, round by round, and whoever says whose turn it is."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable, Sequence


class Turns:
    """This process's end of a socket, by the file descriptor that it inherited.

    A line with the benchmark's name says that the round before is over and the next one is ready; a
    byte comes back when it may begin. Two commits speak this to one script: it stays as it is.
    """

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)

    def wait(self, name: str) -> None:
        self._socket.sendall(f"{name}\n".encode())
        if not self._socket.recv(1):
            raise EOFError("whoever says whose turn it is has ended")

    def close(self) -> None:
        """The end of the process does the same."""
        self._socket.close()


def take_turns(ends: Sequence[socket.socket], ready: Callable[[], None] = lambda: None) -> None:
    """Lets two processes run one round at a time: A B, B A, A B, .., so that a machine that drifts
    does so for both alike. Whoever is not in a round waits. Returns when both have ended.

    `ready` is called once, before the first round, when both are set up for it.
    """
    files = [end.makefile("rb") for end in ends]
    waiting: dict[int, bytes] = {}
    seen: tuple[set[bytes], set[bytes]] = (set(), set())

    def listen(side: int) -> None:
        """To a process that runs, until it is ready for a round or has ended."""
        waiting.pop(side, None)
        if line := files[side].readline():
            waiting[side] = line
            seen[side].add(line)

    def grant(side: int) -> None:
        ends[side].sendall(b".")
        listen(side)

    listen(0)
    listen(1)
    ready()
    for turn in itertools.count():
        if len(waiting) < 2:
            break
        if waiting[0] == waiting[1]:
            grant(turn % 2)
            if 1 - turn % 2 in waiting:
                grant(1 - turn % 2)
        else:  # one has a benchmark that the other has not: let it catch up
            grant(0 if waiting[0] in seen[1] else 1)
    while waiting:
        grant(min(waiting))
