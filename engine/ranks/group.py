"""The caller's side of tp > 1: every rank is a process that can be heard and killed."""

from __future__ import annotations

import pickle
import queue
import time
import weakref
from collections.abc import Callable

from engine.config import ResolvedConfig
from engine.ranks.messages import Close, Dead, FromRanks, Ready, ToRanks
from engine.ranks.processes import Processes
from engine.shape import ModelShape


class RankGroup:
    """The ranks of one engine.

    Args:
        deliver: hears what the ranks send, on a thread of its own; Dead is the last of it, once a
            rank has raised or died and all are killed.

    Attributes:
        send: hands a message to rank 0; never blocks. Raises what pickling it raises.
        world: number of ranks.
        startup: seconds; load and warm-up are the slowest rank's.
        effective: rank 0's effective configuration.

    Raises:
        EngineDeadError, ConfigError, CheckpointError: a rank found it while starting.
    """

    def __init__(
        self, config: ResolvedConfig, shape: ModelShape, deliver: Callable[[FromRanks], None]
    ) -> None:
        begin = time.perf_counter()
        started: queue.SimpleQueue[Ready | Dead] = queue.SimpleQueue()

        def sort(message: FromRanks) -> None:
            if isinstance(message, Ready | Dead):
                started.put(message)
            if not isinstance(message, Ready):
                deliver(message)

        processes = Processes()
        try:
            processes.start(config, shape, sort)
            spawned = time.perf_counter()
            ready = _all_ready(started, config.tp)
        except BaseException:  # an interrupt included: no rank may outlive a failed start
            processes.kill()
            raise
        self.world = config.tp
        self.send: Callable[[ToRanks], None] = lambda message: processes.outbox.put(
            pickle.dumps(message)
        )
        # Also when nobody calls close(): at the end of the process, or when this object goes.
        self._end = weakref.finalize(self, processes.close, pickle.dumps(Close()))
        self.effective = ready[0].effective
        self.startup: dict[str, float | None] = {
            name: max((r.startup[name] for r in ready), key=lambda s: -1.0 if s is None else s)
            for name in ready[0].startup
        }
        waited = time.perf_counter() - spawned
        # Interpreter, imports and process group: what the ranks' own phases leave of the wait.
        own_phases = sum(filter(None, self.startup.values()))
        self.startup["spawn_s"] = spawned - begin + waited - own_phases
        self.startup["total_s"] = time.perf_counter() - begin

    def close(self) -> None:
        """Asks the ranks to leave, kills those that have not after 10 s; repeatable."""
        self._end()


def _all_ready(started: queue.SimpleQueue[Ready | Dead], tp: int) -> list[Ready]:
    """-> in order of rank."""
    ready: dict[int, Ready] = {}
    while len(ready) < tp:
        message = started.get()
        if isinstance(message, Dead):
            raise message.error
        ready[message.rank] = message
    return [ready[rank] for rank in range(tp)]
