"""Which request of nano-vLLM got a token in which step, read off its queue"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Step:
    """One call of step(), as it is seen after it; times in perf_counter seconds.

    Attributes:
        tokens: that it computed; prefill: whether they are of prompts.
        running: the queue of decoding sequences after it; head: the first that waits.
        ended: (seq_id, output) of the sequences that ended in it.
    """

    begin_s: float
    end_s: float
    tokens: int
    prefill: bool
    running: list[Any]
    head: Any
    ended: list[tuple[int, list[int]]]


class Steps:
    """The steps of one call of generate(). During it the queue is copied once a step (256
    sequences: under a microsecond) and looked at afterwards.

    Attributes:
        outputs: number of a request -> its tokens.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._number: dict[int, int] = {}
        self.steps: list[Step] = []
        self.outputs: dict[int, list[int]] = {}

    def add(self, number: int) -> None:
        """Right after add_request: the sequence that waits last is this request."""
        self._number[self._scheduler.waiting[-1].seq_id] = number

    def take(self, step: Callable[[], tuple[list[tuple[int, list[int]]], int]]) -> None:
        """Calls step(), whose count of tokens is negative for a decode step."""
        begin_s = time.perf_counter()
        ended, tokens = step()
        end_s = time.perf_counter()
        waiting = self._scheduler.waiting
        self.steps.append(
            Step(
                begin_s, end_s, abs(tokens), tokens > 0, list(self._scheduler.running),
                waiting[0] if waiting else None, ended,
            )
        )  # fmt: skip

    def given(self) -> list[list[int]]:
        """For each step the requests that it gave a token. A prefill step gives one to each that
        has come into the queue, a decode step to the first in it; and each to those that ended."""
        found = []
        before: set[int] = set()
        for step in self.steps:
            queue = [sequence.seq_id for sequence in step.running]
            ended = [seq_id for seq_id, _ in step.ended]
            if step.prefill:
                served = [seq_id for seq_id in queue if seq_id not in before]
            else:
                served = queue[: step.tokens - len(ended)]
            found.append([self._number[seq_id] for seq_id in [*served, *ended]])
            before = set(queue)
            for seq_id, tokens in step.ended:
                self.outputs[self._number[seq_id]] = tokens
        return found

    def times(self, given: Sequence[Sequence[int]]) -> tuple[dict[int, float], list[list[float]]]:
        """(begin of the first step that held each request, times of its tokens). Only a sequence
        that has a prefill step to itself is cut: a step that gives none held the first waiting."""
        begun: dict[int, float] = {}
        times: list[list[float]] = [[] for _ in self._number]
        for step, served in zip(self.steps, given, strict=True):
            held = served or [self._number[step.head.seq_id]]
            for number in held:
                begun.setdefault(number, step.begin_s)
            for number in served:
                times[number].append(step.end_s)
        return begun, times

    def preemptions(self) -> int:
        """Sequences that left the queue without an end."""
        count = 0
        before: set[int] = set()
        for step in self.steps:
            queue = {sequence.seq_id for sequence in step.running}
            count += len(before - queue - {seq_id for seq_id, _ in step.ended})
            before = queue
        return count
