"""Steps that raise, wherever they do: every request ends, nothing leaks, the next one is served."""

from __future__ import annotations

import queue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import engine.scheduling.scheduler
from engine.comm.types import Phase, StepInfo
from engine.core import EngineCore
from engine.execution.steplog import StepLog
from engine.ranks.messages import Ask, Close, Counters, Results, ToRanks
from engine.ranks.serve import serve
from engine.requests.request import FinishReason, Request
from engine.requests.sampling_params import SamplingParams
from tests.support.fake_model import FakeRunner, reference

PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)


def make(overlap: bool) -> EngineCore:
    runner: Any = FakeRunner(
        num_pages=12, page_size=4, prefix_cache=True, max_num_seqs=4, max_num_batched_tokens=16,
        max_model_len=40, overlap=overlap,
    )  # fmt: skip
    runner.core = EngineCore(runner)
    return runner.core


def drive(core: EngineCore, ended: list[Request]) -> None:
    for _ in range(200):
        if not core.has_work:
            return
        ended += core.step().finished
    raise AssertionError("no end")


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("booking", range(1, 12))
def test_a_booking_that_raises_ends_everybody_once(
    monkeypatch: pytest.MonkeyPatch, overlap: bool, booking: int
) -> None:
    """In the middle of a step's rows too, of which some are booked and some are not."""
    core = make(overlap)
    requests = [Request(str(i), [1 + i, 2, 3, 4, 5], PARAMS, i, 0.0) for i in range(5)]
    for request in requests:
        core.add(request)
    real, calls = engine.scheduling.scheduler.finish_reason, iter(range(1, 1000))

    def failing(*arguments: Any) -> FinishReason | None:
        if next(calls) == booking:
            raise MemoryError("in the tokenizer, say")
        return real(*arguments)

    monkeypatch.setattr(engine.scheduling.scheduler, "finish_reason", failing)
    ended: list[Request] = []
    with pytest.raises(MemoryError):
        drive(core, ended)
    drive(core, ended)
    assert sorted(r.request_id for r in ended) == ["0", "1", "2", "3", "4"]
    assert all(r.finish_reason is FinishReason.ABORT for r in requests)
    core._scheduler.check_invariants()
    assert core._pool.num_free == core._pool.num_pages
    again = Request("again", [1, 2, 3, 4, 5], PARAMS, 0, 0.0)
    core.add(again)
    drive(core, ended)
    assert again.output_ids == reference(again.prompt_ids, PARAMS, 40)[0]


def test_who_asks_is_answered_though_the_step_in_flight_fails() -> None:
    asked: list[Ask] = []

    def settle() -> list[Results]:
        raise MemoryError

    core: Any = SimpleNamespace(has_work=False, settle=settle)
    inbox: queue.SimpleQueue[ToRanks] = queue.SimpleQueue()
    ask = Ask(7, Counters())
    inbox.put(ask)
    inbox.put(Close())
    with pytest.raises(MemoryError):
        serve(core, inbox, lambda results: None, asked.append)
    assert asked == [ask]


def test_wall_times_find_their_steps_over_gaps() -> None:
    """Step 4 raised and left no row; 9 was drained before it was collected."""
    log = StepLog()
    for step in (3, 5, 6):
        log.append(StepInfo(step, Phase.DECODE, 1, 1, 1, 1, "eager"), 10, 20)
    for step in (3, 5, 6, 4, 9):
        log.set_wall(step, 100 * step, 100 * step + 50)
    rows = log.drain()
    assert rows["wall_begin_ns"].tolist() == [300, 500, 600]
    assert (rows["wall_end_ns"] - rows["wall_begin_ns"] == np.full(3, 50)).all()
    log.set_wall(6, 1, 2)  # nothing there any more
    assert len(log.drain()) == 0
