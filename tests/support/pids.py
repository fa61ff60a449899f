"""Which processes the ranks of an engine are, and whether they have ended."""

from __future__ import annotations

import os
import time
from pathlib import Path

from engine import LLM
from engine.comm import CollectiveObserver, ObserverContext


class TellsItsProcess(CollectiveObserver):
    """Hands over the process id of its rank."""

    def __init__(self, context: ObserverContext) -> None: ...

    def result(self) -> int:
        return os.getpid()


def rank_pids(llm: LLM) -> list[int]:
    llm.attach([TellsItsProcess])
    return [observers[0] for observers in llm.detach()]


def assert_gone(pids: list[int], within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while alive := [pid for pid in pids if _is_running(pid)]:
        assert time.monotonic() < deadline, f"still alive: {alive}"
        time.sleep(0.05)


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
