"""Client on ranks that only note what they are sent: steps that fail, errors that many hear, and
what interrupts and the garbage collector leave."""

from __future__ import annotations

import copy
import pickle
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from engine import EngineDeadError, SamplingParams
from engine.frontend.call import Call
from engine.frontend.client import Client, Event
from engine.frontend.intake import Intake
from engine.ranks.messages import Abort, Dead, FromRanks, Results, StepFailed, Submit, ToRanks
from engine.requests.request import FinishReason
from engine.requests.tokenizer import Tokenizer

INTAKE = Intake(Tokenizer("nowhere"), seed=0)


class NotingRanks:
    world = 1

    def __init__(self, deliver: Callable[[FromRanks], None]) -> None:
        self.deliver = deliver
        self.sent: list[ToRanks] = []
        self.send: Callable[[ToRanks], None] = self.sent.append
        self.startup: dict[str, float | None] = {}
        self.effective: dict[str, Any] = {}

    def close(self) -> None: ...


def started() -> tuple[Client, NotingRanks]:
    client = Client(NotingRanks)
    ranks = client.ranks
    assert isinstance(ranks, NotingRanks)
    return client, ranks


def call(n: int = 1, request_id: str | None = None) -> Call:
    ids = None if request_id is None else [request_id]
    return INTAKE.calls([[1]], SamplingParams(n=n), ids)[0]


def ids(*calls: Call) -> tuple[str, ...]:
    return tuple(request.request_id for call in calls for request in call.requests)


def test_a_step_that_fails_ends_what_still_lies_in_the_inbox() -> None:
    """The engine knows nothing of a Submit that it has not read, and its caller cannot say it: the
    client has dropped the call by the time that the caller hears of the failure."""
    client, ranks = started()
    heard: list[Event] = []
    one, two, late = call(n=2), call(), call()
    client.open([one, two, late], heard.append)
    client.submit([one])
    client.submit([two])
    ranks.deliver(StepFailed(OSError("planted")))
    client.submit([late])  # its caller has not looked yet
    client.drop([one, two, late])
    assert ranks.sent == [
        Submit(tuple(one.requests)),
        Submit(tuple(two.requests)),
        Abort(ids(one, two, late)),
    ]
    assert [(type(e), str(e)) for e in heard] == [(OSError, "planted")] * 4
    client.open([one], heard.append)  # the id is free again, and the engine goes on
    client.submit([one])
    assert ranks.sent[3:] == [Submit(tuple(one.requests))]


def test_nothing_is_sent_to_ranks_that_are_gone() -> None:
    client, ranks = started()
    heard: list[Event] = []
    one = call()
    client.open([one], heard.append)
    ranks.deliver(Dead(EngineDeadError(1, -9)))
    client.drop([one])
    assert ranks.sent == [] and len(heard) == 1


@pytest.mark.parametrize("error", [EngineDeadError(3, None, "OSError: x"), RuntimeError("gone")])
def test_everyone_raises_an_error_of_its_own(error: Exception) -> None:
    client, ranks = started()
    heard: list[Any] = []
    client.open([call(), call()], heard.append)
    ranks.deliver(Dead(error))
    frames = []
    for _ in range(4):
        try:
            client.abort("x")
        except type(error) as raised:
            heard.append(raised)
            frames.append(len(traceback.extract_tb(raised.__traceback__)))
    assert frames == [3] * 4  # here, abort and _check
    assert len({id(e) for e in [error, *heard]}) == 7
    assert [(type(e), str(e), vars(e)) for e in heard] == [
        (type(error), str(error), vars(error))
    ] * 6


def test_a_dead_engine_error_copies_and_pickles() -> None:
    error = EngineDeadError(3, -9, "Traceback ...")
    for other in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert (str(other), vars(other)) == (str(error), vars(error))


def test_an_error_keeps_where_a_step_raised_it_and_one_that_does_not_copy_is_heard_too() -> None:
    class Needs(Exception):
        def __init__(self, one: int, two: int) -> None:
            super().__init__(f"{one} and {two}")

    for make in (lambda: OSError("planted"), lambda: Needs(1, 2)):
        client, ranks = started()
        heard: list[Any] = []
        client.open([call(n=2)], heard.append)
        try:
            raise make() from ValueError("cause")
        except Exception as error:
            ranks.deliver(StepFailed(error))
            for own in heard:
                assert (type(own), str(own)) == (type(error), str(error))
                assert str(own.__cause__) == "cause"
                assert traceback.extract_tb(own.__traceback__)[0].line == (
                    'raise make() from ValueError("cause")'
                )
        assert len(heard) == 2


class Sinks(dict[str, Any]):
    """What happens in the middle of a method of the client, once."""

    def __init__(self, after_pop: Callable[[], None] | None = None) -> None:
        self._after_pop = after_pop
        self.interrupts = after_pop is None

    def pop(self, *args: Any) -> Any:
        value = super().pop(*args)
        act, self._after_pop = self._after_pop, None
        if act is not None:
            act()
        return value

    def update(self, *args: Any, **kwargs: Any) -> None:
        if self.interrupts:
            self.interrupts = False
            raise KeyboardInterrupt
        super().update(*args, **kwargs)


def test_a_stream_may_be_collected_while_one_of_its_samples_ends() -> None:
    client, ranks = started()
    two = call(n=2, request_id="x")
    client._sinks = Sinks(after_pop=lambda: client.drop([two]))
    client.open([two], lambda event: None)
    client.submit([two])
    two.requests[0].finish_reason = FinishReason.LENGTH
    ranks.deliver(Results((two.requests[0],)))
    assert ranks.sent[1:] == [Abort(ids(two)[1:])]
    again = call(request_id="x")
    client.open([again], lambda event: None)
    assert not again.finished


def test_an_interrupt_while_an_id_is_taken_leaves_it_free() -> None:
    client, _ = started()
    client._sinks = Sinks()
    first, second = call(request_id="x"), call(request_id="x")
    with pytest.raises(KeyboardInterrupt):
        client.open([first], lambda event: None)
    client.drop([first])
    client.open([second], lambda event: None)
    assert not second.finished


def test_a_call_that_was_refused_does_not_free_the_id_of_another() -> None:
    client, _ = started()
    first, second, third = (call(request_id="x") for _ in range(3))
    client.open([first, second], lambda event: None)
    client.drop([second])
    client.open([third], lambda event: None)
    assert "request_id='x' is in use" in str(second.requests[0].error)
    assert "request_id='x' is in use" in str(third.requests[0].error)
