"""Small engines on the CPU, and what a test asks of them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from engine import LLM
from engine.comm import CollectiveObserver, ObserverContext, StepInfo

# Eager, one thread a rank, unless a test says otherwise.
SMALL: dict[str, Any] = {
    "enforce_eager": True,
    "page_size": 8,
    "device": "cpu",
    "threads_per_rank": 1,
}


def small_engine(path: Path, **options: Any) -> LLM:
    return LLM(path, **{**SMALL, **options})


class Unhurried(CollectiveObserver):
    """Makes each step last 10 ms at least, so that what must happen while requests run does, where
    the test's own process is late by some hundred."""

    def __init__(self, context: ObserverContext) -> None: ...

    def step_begin(self, step: StepInfo) -> None:
        time.sleep(0.01)


def assert_idle(llm: LLM) -> None:
    """No request is left: after a while, in which aborts arrive, no step is run any more."""
    deadline = time.monotonic() + 60
    while True:
        before = llm.counters()["scheduled_steps"]
        time.sleep(0.05)
        if llm.counters()["scheduled_steps"] == before:
            return
        assert time.monotonic() < deadline, "a request that nobody waits for runs on"
