"""Ranks in processes that torchrun started, on one node or many: who calls, and who serves

The process of global rank 0 builds engines; each other one waits for them and, for each, starts a
process that is the rank of its number. torchrun's own store tells where the caller listens; all
that follows goes over links.py, in the messages of the pipes within one machine.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, wait
from typing import Any

from engine.comm.rendezvous import Board, LaunchedBy
from engine.config import ResolvedConfig
from engine.errors import ConfigError
from engine.ranks.links import Door, dial
from engine.shape import ModelShape
from engine.workers import Place, RankChannels, rank_main

logger = logging.getLogger(__name__)

_LINKS = ("agent", "caller", "steps")
_ANSWER_S = 10.0  # within which an agent says how its rank ended, once told to end it


@contextmanager
def under_torchrun() -> Iterator[bool]:
    """What a script that torchrun starts does all its work in; yields whether this process is the
    one to do it, which engines with ranks="torchrun" then may.

    >>> with under_torchrun() as first:
    ...     if first:
    ...         with LLM("DIR", tp=2, ranks="torchrun") as llm: ...

    In every other process it serves as a rank of those engines first, until that one leaves.

    Raises:
        ConfigError: torchrun did not start this process.
    """
    me = LaunchedBy.torchrun()
    board = Board(me, keep=me.rank == 0)
    if me.rank > 0:
        _serve(board, me)
        yield False
        return
    try:
        yield True
    finally:
        board.offer("")


def _serve(board: Board, me: LaunchedBy) -> None:
    for number in count(1):
        offer = board.read(number)
        if not offer:
            return
        found = json.loads(offer)
        if me.rank < found["tp"]:
            try:
                _be_rank(found, me)
            except (OSError, EOFError, AuthenticationError) as error:
                logger.warning("rank %d: the caller of engine %d left: %s", me.rank, number, error)


def _be_rank(offer: dict[str, Any], me: LaunchedBy) -> None:
    """One engine: a process that is the rank, until it ends or the caller ends it."""
    key = bytes.fromhex(offer["key"])
    links = [
        dial(offer["host"], offer["port"], key, f"{name} {me.rank}".encode()) for name in _LINKS
    ]
    agent, caller, steps = links
    process = None
    try:
        config, shape, host, port = agent.recv()
        place = Place(me.rank, config.first_gpu + me.local_rank, host, port)
        channels = RankChannels(caller, steps, [])
        process = multiprocessing.get_context("spawn").Process(
            target=_rank_of_agent, args=(place, config, shape, channels), daemon=True
        )
        process.start()
        for link in (caller, steps):
            link.close()
        while process.sentinel not in wait([agent, process.sentinel]):
            with suppress(EOFError, OSError):  # the caller is gone, which the rank sees too
                agent.recv()
            process.kill()
            process.join()
        process.join()
        agent.send(process.exitcode)
    finally:
        if process is not None and process.is_alive():
            process.kill()
            process.join()
        for link in links:
            link.close()


def _rank_of_agent(
    place: Place, config: ResolvedConfig, shape: ModelShape, channels: RankChannels
) -> None:
    threading.Thread(target=_end_with_agent, daemon=True).start()
    rank_main(place, config, shape, channels)


def _end_with_agent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(3)


class RemoteRank:
    """A rank in another process' care, as its caller sees it; what `multiprocessing.Process` has,
    as far as processes.py needs it.

    Attributes:
        caller, steps: the links that a rank of this machine has as pipes.
        exitcode: of the rank; None while it runs, or if its agent is lost.
        lost: the agent went without a word, and its machine perhaps with it.
    """

    def __init__(self, agent: Connection, caller: Connection, steps: Connection) -> None:
        self.caller = caller
        self.steps = steps
        self.sentinel = agent
        self.pid = 0  # not None: it was started
        self.lost = False
        self._exitcode: int | None = None
        self._reading = threading.Lock()

    def begin(self, config: ResolvedConfig, shape: ModelShape, host: str, port: int) -> None:
        self.sentinel.send((config, shape, host, port))

    @property
    def exitcode(self) -> int | None:
        self.join(0.0)
        return self._exitcode

    def is_alive(self) -> bool:
        return self.exitcode is None and not self.lost

    def kill(self) -> None:
        with suppress(OSError):
            self.sentinel.send(None)

    def join(self, timeout: float | None = None) -> None:
        limit = _ANSWER_S if timeout is None else timeout
        with self._reading:
            if self._exitcode is not None or self.lost:
                return
            try:
                if self.sentinel.poll(limit):
                    self._exitcode = self.sentinel.recv()
                else:
                    self.lost = timeout is None
            except (EOFError, OSError):
                self.lost = True

    def close(self) -> None:
        self.sentinel.close()


def meet(config: ResolvedConfig) -> tuple[str, dict[int, RemoteRank]]:
    """Calls the agents of ranks 1 and up; -> the address on which ranks meet, and the ranks.

    Raises:
        ConfigError: they did not come within config.timeout_s, or the address is not of this
            machine.
    """
    me = LaunchedBy.torchrun()
    try:
        door = Door(me.host)
    except OSError as error:
        raise ConfigError(
            f"ranks='torchrun': {me.host}, where torchrun's ranks meet, is no address of this "
            f"machine ({error.strerror}); give torchrun --local-addr or --master-addr"
        ) from error
    links: dict[str, Connection] = {}
    wanted = {f"{name} {rank}" for name in _LINKS for rank in range(1, config.tp)}
    try:
        offer = {"host": door.host, "port": door.port, "key": door.key.hex(), "tp": config.tp}
        Board(me).offer(json.dumps(offer, allow_nan=False))
        deadline = time.monotonic() + config.timeout_s
        while wanted - set(links):
            said, connection = door.accept(deadline)
            links[said.decode(errors="replace")] = connection
    except TimeoutError as error:
        for connection in links.values():
            connection.close()
        absent = sorted({int(name.split()[1]) for name in wanted - set(links)})
        raise ConfigError(
            f"ranks='torchrun': the processes of ranks {absent} did not come within "
            f"timeout_s={config.timeout_s:g} s; each must be in engine.under_torchrun()"
        ) from error
    finally:
        door.close()
    return door.host, {
        rank: RemoteRank(*(links[f"{name} {rank}"] for name in _LINKS))
        for rank in range(1, config.tp)
    }
