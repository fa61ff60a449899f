"""tests/support/turns.py: whose round comes when."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence

import pytest

from tests.support.turns import Turns, take_turns

ALL = ["one", "one", "one", "one", "two", "two"]


@pytest.mark.parametrize(
    ("base", "head", "order"),
    [
        (ALL, ALL, "A1 B1 B1 A1 A1 B1 B1 A1 A2 B2 B2 A2"),
        (ALL, ["new", "new", *ALL], "Bn Bn A1 B1 B1 A1 A1 B1 B1 A1 A2 B2 B2 A2"),
        (["one", "old", "two"], ["one", "two"], "A1 B1 B2 Ao A2"),  # late by what is gone
        (["one"], ["one", "one", "one"], "A1 B1 B1 B1"),
        ([], ["one", "two"], "B1 B2"),
    ],
)
def test_rounds_alternate(base: Sequence[str], head: Sequence[str], order: str) -> None:
    short = {"one": "1", "two": "2", "new": "n", "old": "o"}
    done: list[str] = []

    def process(side: str, descriptor: int, names: Sequence[str]) -> None:
        turns = Turns(descriptor)
        for name in names:
            turns.wait(name)
            done.append(side + short[name])
        turns.close()

    ends = []
    threads = []
    for side, names in (("A", base), ("B", head)):
        here, there = socket.socketpair()
        ends.append(here)
        threads.append(threading.Thread(target=process, args=(side, there.detach(), names)))
    for thread in threads:
        thread.start()
    before: list[list[str]] = []
    take_turns(ends, lambda: before.append(list(done)))
    for thread in threads:
        thread.join(timeout=30)
    assert " ".join(done) == order and before == [[]]
