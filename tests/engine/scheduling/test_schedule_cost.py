"""Scheduler: what a decode step costs, as counts of calls and of tokens read."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from engine.requests.request import Request
from engine.requests.sampling_params import SamplingParams
from tests.support.scheduling import Engine


def calls(run: Callable[[], object]) -> int:
    count = 0

    def profile(frame: FrameType, kind: str, argument: object) -> None:
        nonlocal count
        count += kind in ("call", "c_call")

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


class Watched(list[int]):
    """A prompt that counts how many of its tokens are read."""

    read = 0

    def __getitem__(self, index: Any) -> Any:
        value = super().__getitem__(index)
        self.read += len(value) if isinstance(index, slice) else 1
        return value

    def __iter__(self) -> Any:
        self.read += len(self)
        return super().__iter__()

    def __add__(self, other: Any) -> Any:
        self.read += len(self)
        return super().__add__(other)


def decode_cost(context: int) -> tuple[int, int]:
    """Function calls and prompt tokens read in 16 decode steps behind a context of that length,
    with a head in the queue that does not fit and must not be looked up again each step."""
    engine = Engine(num_pages=context // 4 + 6, budget=context, max_model_len=10 * context)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    running = Request("run", Watched(range(context)), params, seed=0, arrival_s=0.0)
    blocked = Request("head", Watched(range(context)), params, seed=0, arrival_s=0.0)
    blocked.prompt_ids[0] = 7
    engine.scheduler.add(running)
    engine.step()
    engine.scheduler.add(blocked)
    engine.step()
    prompts = [r.prompt_ids for r in (running, blocked)]
    for prompt in prompts:
        prompt.read = 0  # type: ignore[attr-defined]

    def sixteen_steps() -> None:
        for _ in range(16):
            schedule = engine.scheduler.schedule()
            engine.scheduler.update(schedule, [5], 0.0)

    count = calls(sixteen_steps)
    assert len(running.output_ids) == 18
    assert blocked.slot == -1
    return count, sum(p.read for p in prompts)  # type: ignore[attr-defined]


def test_the_work_of_a_decode_step_is_flat_in_context_length() -> None:
    assert decode_cost(64) == decode_cost(8_192)
