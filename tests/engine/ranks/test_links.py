"""Links between nodes: as pipes are for those who hold the key, closed to others, ended in time."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection

import pytest

from engine.ranks import links
from engine.ranks.links import Door, dial


@pytest.fixture
def door() -> Iterator[Door]:
    door = Door("127.0.0.1")
    yield door
    door.close()


def soon(seconds: float = 60.0) -> float:
    return time.monotonic() + seconds


def both(door: Door) -> tuple[Connection, Connection]:
    """(the caller's end, the peer's end)"""
    peers: list[Connection] = []

    def call() -> None:
        peers.append(dial(door.host, door.port, door.key, b"steps 1"))

    thread = threading.Thread(target=call)
    thread.start()
    said, ours = door.accept(soon())
    thread.join()
    assert said == b"steps 1"
    return ours, peers[0]


def test_a_link_carries_objects_and_bytes_both_ways_and_its_end(door: Door) -> None:
    ours, theirs = both(door)
    theirs.send({"rank": 1})
    assert ours.recv() == {"rank": 1}
    whole = os.urandom(3_000_000)  # more than the sockets hold
    sender = threading.Thread(target=ours.send_bytes, args=(whole,))
    sender.start()
    assert theirs.recv_bytes() == whole
    sender.join()
    ours.close()
    with pytest.raises(EOFError):
        theirs.recv()


def test_a_link_waits_for_as_long_as_nothing_is_said(door: Door) -> None:
    """The limit of a greeting is not the link's."""
    for end in both(door):
        with socket.socket(fileno=os.dup(end.fileno())) as own:
            assert own.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16) == bytes(16)


def test_a_machine_that_is_gone_is_noticed_within_ten_seconds(door: Door) -> None:
    ours, theirs = both(door)
    for end in (ours, theirs):
        own = socket.socket(fileno=os.dup(end.fileno()))
        with own:
            options = [
                own.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
                for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
            ]
            assert own.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert own.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
        idle, interval, number, unanswered_ms = options
        assert max(idle + interval * number, unanswered_ms / 1000) <= 5


def test_strangers_are_turned_away_and_do_not_keep_others_out(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "_GREETING_S", 3)
    refused: list[BaseException] = []

    def strangers() -> None:
        with socket.create_connection((door.host, door.port)) as silent:
            for say in (b"\x00\x00\x00\x04junk", b"\xff" * 64):
                with socket.create_connection((door.host, door.port)) as talker:
                    talker.sendall(say)
            try:
                dial(door.host, door.port, b"another key", b"steps 1")
            except (AuthenticationError, OSError, EOFError) as error:
                refused.append(error)
            found.append(dial(door.host, door.port, door.key, b"steps 2"))
            silent.recv(1)

    found: list[Connection] = []
    thread = threading.Thread(target=strangers)
    thread.start()
    said, ours = door.accept(soon(30))
    assert said == b"steps 2"
    thread.join()
    assert len(refused) == 1
    ours.close()


def test_nobody_comes(door: Door) -> None:
    with pytest.raises(TimeoutError):
        door.accept(soon(0.1))


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(OSError):
        Door("192.0.2.1")  # TEST-NET-1 (RFC 5737): nobody's
