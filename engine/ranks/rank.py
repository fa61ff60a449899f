"""One rank between steps: answers control messages alike in any process."""

from __future__ import annotations

from typing import Any

from engine.comm.types import CollectiveObserver, ObserverContext
from engine.core import EngineCore
from engine.execution.runner import Runner
from engine.ranks.messages import (
    Attach,
    Captures,
    Control,
    Counters,
    Detach,
    DrainSteps,
    Memory,
    ResetPrefixCache,
)


class Rank:
    """A runner, its observers, and on rank 0 the core."""

    def __init__(self, runner: Runner, core: EngineCore | None) -> None:
        self.runner = runner
        self.core = core
        self._observers: list[CollectiveObserver] = []

    def handle(self, message: Control) -> Any:
        """-> the reply's value; what it is stands beside the case."""
        match message:
            case Attach(factories):
                # Those before go without a result, and so do graphs with them inside.
                self.runner.synchronize()
                self.runner.forget_observed_graphs()
                comm = self.runner.comm
                device = str(self.runner.device)
                context = ObserverContext(
                    comm.rank, comm.world, device, align=comm.align, rehearse=comm.rehearse
                )
                self._observers = [make(context) for make in factories]
                comm.attach(self._observers)
                return None
            case Detach():
                # A follower returns from a step before its device does.
                self.runner.synchronize()
                self.runner.comm.attach(())
                self.runner.forget_observed_graphs()
                observers, self._observers = self._observers, []
                return [observer.result() for observer in observers]
            case DrainSteps():
                return self.runner.drain_steps()  # rows of steplog.STEP_DTYPE
            case Counters():
                own = self.runner.counters()
                return own if self.core is None else {**own, **self.core.counters()}
            case Memory():
                return self.runner.memory()  # bytes by name
            case Captures():
                return [(c.bucket, c.seconds, c.bytes) for c in self.runner.captures()]
            case ResetPrefixCache():
                if self.core is not None:
                    self.core.reset_prefix_cache()
                return None
