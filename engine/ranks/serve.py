"""Rank 0's loop: takes messages between steps, runs steps, sends what came of them."""

from __future__ import annotations

import queue
from collections.abc import Callable

from engine.core import EngineCore
from engine.ranks.messages import Abort, Ask, Close, Results, Submit, ToRanks


def serve(
    core: EngineCore,
    inbox: queue.SimpleQueue[ToRanks],
    send: Callable[[Results], None],
    control: Callable[[Ask], None],
) -> None:
    """Runs until Close, asleep while there is nothing to do. What a step raises goes through; the
    loop may be entered again.

    Args:
        control: does what a control message asks, on every rank, and replies.
    """
    while True:
        while not core.has_work or not inbox.empty():
            match inbox.get():
                case Submit(requests):
                    for request in requests:
                        core.add(request)
                case Abort(request_ids):
                    for request_id in request_ids:
                        core.abort(request_id)
                case Ask() as ask:
                    try:
                        for results in core.settle():
                            _send(results, send)
                    finally:  # whoever asks is answered, whatever became of the steps
                        control(ask)
                case Close():
                    return
        _send(core.step(), send)


def _send(results: Results, send: Callable[[Results], None]) -> None:
    if results.finished or results.tokens:
        send(results)
