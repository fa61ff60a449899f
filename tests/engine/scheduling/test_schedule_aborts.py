"""Scheduler: an abort in every state of a request, whose pages are freed once."""

from __future__ import annotations

from engine.requests.request import FinishReason, Request
from engine.requests.sampling_params import SamplingParams
from tests.support.scheduling import Engine, table


def test_abort_while_waiting() -> None:
    engine = Engine(max_num_seqs=1)
    engine.add("a", 3)
    waiting = engine.add("b", 3)
    engine.step()
    assert engine.scheduler.abort("b") is waiting
    assert waiting.finish_reason is FinishReason.ABORT
    assert engine.scheduler.abort("b") is None
    assert engine.scheduler.num_waiting == 0


def test_abort_between_steps() -> None:
    engine = Engine()
    request = engine.add("a", 3)
    engine.step()
    assert engine.scheduler.abort("a") is request
    assert (request.slot, request.page_ids, request.output_ids) == (-1, [], [5])
    assert engine.pool.num_free == 64
    assert not engine.scheduler.has_work


def test_abort_in_flight_drops_the_token() -> None:
    engine = Engine()
    request = engine.add("a", 3)
    engine.step()
    schedule = engine.schedule()
    assert engine.scheduler.abort("a") is None
    assert engine.scheduler.abort("a") is None
    assert request.page_ids  # its step still writes there
    assert engine.update(schedule) == [request]
    assert (request.finish_reason, request.output_ids) == (FinishReason.ABORT, [5])
    assert engine.pool.num_free == 64


def test_abort_of_one_that_the_step_in_flight_leaves_out() -> None:
    engine = Engine(budget=4, max_num_seqs=3)
    engine.add("a", 2)
    half = engine.add("half", 9)
    engine.step()
    other = engine.add("other", 2)
    schedule = engine.schedule()
    assert table(schedule) == [("a", 2, 1, True), ("half", 2, 3, False)]
    assert engine.scheduler.abort("other") is other
    assert engine.scheduler.abort("half") is None
    assert engine.update(schedule) == [half]
    assert half.output_ids == []


def test_abort_when_preempted_in_the_step_in_flight() -> None:
    engine = Engine(num_pages=4)
    engine.add("old", 7, SamplingParams(max_tokens=6, ignore_eos=True))
    young = engine.add("young", 7, SamplingParams(max_tokens=6, ignore_eos=True))
    engine.step()
    engine.step()
    schedule = engine.schedule()
    assert schedule.preempted == [young]
    assert engine.scheduler.abort("young") is young
    assert engine.update(schedule) == []
    engine.finish_all()
    assert engine.pool.num_free == 4


def test_abort_of_an_unknown_id() -> None:
    assert Engine().scheduler.abort("nobody") is None


def test_a_thousand_aborts_in_every_state_free_each_page_once() -> None:
    """The last token is in flight, the prompt is half computed, nothing has run: no double free."""
    engine = Engine(num_pages=12, max_num_seqs=3, budget=4)
    for i in range(1_000):
        prompt = [i, 2, 3, 4, 5, 6]
        request = engine.add(f"r{i}", prompt, SamplingParams(max_tokens=2, ignore_eos=True))
        finished: list[Request] = []
        for _ in range(i % 3):
            engine.step()
        if i % 2:
            schedule = engine.schedule()
            assert engine.scheduler.abort(request.request_id) is None
            finished = engine.update(schedule)
        else:
            aborted = engine.scheduler.abort(request.request_id)
            finished = [aborted] if aborted else []
        assert finished == [request]
        assert request.finish_reason is FinishReason.ABORT
        assert engine.pool.num_free == 12
    assert not engine.scheduler.has_work
