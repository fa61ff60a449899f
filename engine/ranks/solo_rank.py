"""The caller's side of tp=1: the one rank is a thread of the caller's process."""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from engine.comm.ops import communicators
from engine.comm.solo import SoloCommunicator
from engine.config import ResolvedConfig
from engine.core import EngineCore
from engine.errors import ConfigError
from engine.execution.runner import Runner
from engine.ranks.messages import Ask, Close, FromRanks, Ready, Reply, StepFailed, ToRanks
from engine.ranks.rank import Rank
from engine.ranks.serve import serve
from engine.shape import ModelShape

_CACHE_VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


class SoloRank:
    """Same methods as group.RankGroup.

    The rank has a thread because several things belong to one: the number of intra-op threads, the
    current GPU, and where Ctrl-C strikes. So several engines live side by side, the caller's own
    settings stay as they are, and an interrupt finds the caller waiting and not a step half booked.

    Args:
        deliver: hears what the rank sends, on the rank's thread.

    Attributes:
        send: hands a message to the rank; never blocks.
        world: 1.
        startup, effective: as of RankGroup.
    """

    world = 1

    def __init__(
        self, config: ResolvedConfig, shape: ModelShape, deliver: Callable[[FromRanks], None]
    ) -> None:
        begin = time.perf_counter()
        inbox: queue.SimpleQueue[ToRanks] = queue.SimpleQueue()
        started: queue.SimpleQueue[Ready | BaseException] = queue.SimpleQueue()
        thread = threading.Thread(
            target=_run_rank,
            args=(config, shape, inbox, deliver, started),
            name="rangefinder-rank0",
            daemon=True,
        )
        thread.start()
        self.send: Callable[[ToRanks], None] = inbox.put
        # Also when nobody calls close(): at the end of the process, or when this object goes.
        self._end = weakref.finalize(self, _end, inbox, thread)
        try:
            ready = started.get()
        except BaseException:  # an interrupt; what was loaded so far is freed
            self._end()
            raise
        if isinstance(ready, BaseException):
            raise ready
        self.effective = ready.effective
        total = time.perf_counter() - begin
        self.startup: dict[str, float | None] = {**ready.startup, "spawn_s": None, "total_s": total}

    def close(self) -> None:
        """Frees the model; repeatable."""
        self._end()


def _end(inbox: queue.SimpleQueue[ToRanks], thread: threading.Thread) -> None:
    inbox.put(Close())
    if thread is not threading.current_thread():  # the garbage collector may run anywhere
        thread.join()


def _run_rank(
    config: ResolvedConfig,
    shape: ModelShape,
    inbox: queue.SimpleQueue[ToRanks],
    deliver: Callable[[FromRanks], None],
    started: queue.SimpleQueue[Ready | BaseException],
) -> None:
    comm = SoloCommunicator(config.cache_dir)
    with _cache_folders(comm):
        try:
            _check_cache_dir(comm)
            if config.device == "cuda":
                torch.cuda.set_device(config.first_gpu)
            else:
                _set_threads(config.threads_per_rank)
            runner = Runner(config, shape, comm)
            core = EngineCore(runner)
        except BaseException as error:
            comm.close()
            started.put(error)
            return
        started.put(Ready(0, runner.startup, runner.effective))
        _serve(Rank(runner, core), core, inbox, deliver)
        runner.close()


def _serve(
    rank: Rank,
    core: EngineCore,
    inbox: queue.SimpleQueue[ToRanks],
    deliver: Callable[[FromRanks], None],
) -> None:
    """Until Close. What a step or an observer raises is its caller's to see; the rank goes on."""

    def control(ask: Ask) -> None:
        value: Any = None
        raised: BaseException | None = None
        try:
            value = rank.handle(ask.message)
        except BaseException as error:
            raised = error
        deliver(Reply(0, ask.ticket, value, raised))

    while True:
        try:
            return serve(core, inbox, deliver, control)
        except BaseException as error:
            deliver(StepFailed(error))


def _set_threads(count: int) -> None:
    """The number of intra-op threads belongs to the thread that sets it, but torch also makes it
    the default of every thread that comes later; one that ends at once puts the default back."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    other = threading.Thread(target=torch.set_num_threads, args=(before,))
    other.start()
    other.join()


def _check_cache_dir(comm: SoloCommunicator) -> None:
    others = [c for c in communicators() if isinstance(c, SoloCommunicator) and c is not comm]
    taken = [c.cache_dir for c in others if c.cache_dir is not None]
    if comm.cache_dir is not None and taken:
        raise ConfigError(
            f"cache_dir={comm.cache_dir!r}: another engine at tp=1 in this process has "
            f"cache_dir={taken[0]!r}, and torch knows one folder a process: close that engine "
            "first, leave one cache_dir out, or run one engine in a process of its own"
        )


@contextmanager
def _cache_folders(comm: SoloCommunicator) -> Iterator[None]:
    """The runner sets the compile-cache folders of the process; afterwards they are as before."""
    before = {name: os.environ.get(name) for name in _CACHE_VARIABLES}
    try:
        yield
    finally:
        if comm.cache_dir is not None:
            for name, value in before.items():
                os.environ.pop(name, None)
                os.environ.update({} if value is None else {name: value})
