"""What a rank's process runs; ranks/processes.py is the caller's side.

The caller's process holds no rank at tp > 1, so it can always report and kill. Rank 0 plans and
samples; each step goes from it to the other ranks over a pipe of their own as StepPlan bytes.
Control messages take the same pipes, so all ranks act on them between the same two steps.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from engine.comm.base import Communicator
from engine.comm.ranks import connect_rank
from engine.config import ResolvedConfig
from engine.core import EngineCore
from engine.errors import CheckpointError, ConfigError
from engine.execution.runner import Runner
from engine.ranks.messages import Ask, Close, Failed, Ready, Reply, ToRanks
from engine.ranks.rank import Rank
from engine.ranks.serve import serve
from engine.scheduling.step import StepPlan
from engine.shape import ModelShape

_STEP, _CONTROL = b"S", b"C"
_ORPHANED = 3  # exit code of a rank whose caller is gone


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank runs, and where it meets the others.

    Attributes:
        gpu: of this machine, for a device of cuda.
        host, port: of the caller's Rendezvous.
    """

    rank: int
    gpu: int
    host: str
    port: int


class RankChannels:
    """The pipes of one rank: to the caller, and rank 0's to each other rank (one way)."""

    def __init__(
        self, caller: Connection, steps_in: Connection | None, steps_out: list[Connection]
    ) -> None:
        self.caller = caller
        self.steps_in = steps_in
        self.steps_out = steps_out


def rank_main(
    place: Place, config: ResolvedConfig, shape: ModelShape, channels: RankChannels
) -> None:
    """A rank's process; it reports an exception to the caller and exits with 1."""
    # Ctrl-C reaches the whole process group; the caller decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    inbox: queue.SimpleQueue[ToRanks] = queue.SimpleQueue()
    watcher = threading.Thread(target=_watch_caller, args=(channels.caller, inbox), daemon=True)
    watcher.start()
    try:
        _run_rank(place, config, shape, channels, inbox)
    except BaseException as error:
        mendable = isinstance(error, ConfigError | CheckpointError)
        channels.caller.send(
            Failed(
                place.rank,
                traceback.format_exc(),
                time.perf_counter(),
                (type(error).__name__, str(error)) if mendable else None,
            )
        )
        # Not sys.exit: a peer may sit in a collective that only this process's end will break.
        os._exit(1)


def _watch_caller(caller: Connection, inbox: queue.SimpleQueue[ToRanks]) -> None:
    """Moves messages to the inbox, so that the caller's sends never block on a busy rank; ends the
    process when the caller is gone, whatever the main thread waits for."""
    while True:
        try:
            inbox.put(caller.recv())
        except (EOFError, OSError):
            os._exit(_ORPHANED)


def _run_rank(
    place: Place,
    config: ResolvedConfig,
    shape: ModelShape,
    channels: RankChannels,
    inbox: queue.SimpleQueue[ToRanks],
) -> None:
    if config.device == "cuda":
        torch.cuda.set_device(place.gpu)
    else:
        torch.set_num_threads(config.threads_per_rank)
    rank = place.rank
    comm = connect_rank(rank, config.tp, config.comm, place.port, config.timeout_s, place.host)
    runner = Runner(config, shape, comm, agree=comm.min_over_ranks)
    core = EngineCore(runner, _plan_sender(channels)) if rank == 0 else None
    channels.caller.send(Ready(rank, runner.startup, runner.effective))
    member = Rank(runner, core)
    if core is not None:
        _serve(member, core, channels, inbox)
    else:
        assert channels.steps_in is not None
        _follow(member, channels.steps_in, channels.caller)
    _shut_down(runner, comm)


def _plan_sender(channels: RankChannels) -> Callable[[StepPlan], None]:
    def send(plan: StepPlan) -> None:
        message = _STEP + plan.to_bytes()
        for peer in channels.steps_out:
            peer.send_bytes(message)

    return send


def _serve(
    member: Rank, core: EngineCore, channels: RankChannels, inbox: queue.SimpleQueue[ToRanks]
) -> None:
    """Rank 0, until Close. What concerns every rank goes to the others by the way of the steps."""

    def tell(message: Ask | Close) -> None:
        for peer in channels.steps_out:
            peer.send_bytes(_CONTROL + pickle.dumps(message))

    def control(ask: Ask) -> None:
        tell(ask)
        channels.caller.send(Reply(0, ask.ticket, member.handle(ask.message)))

    serve(core, inbox, channels.caller.send, control)
    tell(Close())


def _follow(member: Rank, steps: Connection, caller: Connection) -> None:
    """Ranks 1 and up: run the plans that rank 0 sends, return at Close."""
    while True:
        message = steps.recv_bytes()
        if message[:1] == _STEP:
            member.runner.launch(StepPlan.from_bytes(message[1:]))
            continue
        control = pickle.loads(message[1:])
        if isinstance(control, Close):
            return
        rank = member.runner.comm.rank
        caller.send(Reply(rank, control.ticket, member.handle(control.message)))


def _shut_down(runner: Runner, comm: Communicator) -> None:
    comm.barrier()  # no rank tears the group down while another still uses it
    runner.close()
