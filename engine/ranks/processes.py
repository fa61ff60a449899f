"""The rank processes of an engine and the pipes to them: a thread reads, another writes.

No other thread touches a pipe. An interrupt can strike a caller at any instruction, and between two
reads or two writes of one message it would leave the pipe out of step for good.
"""

from __future__ import annotations

import multiprocessing
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection, wait

from engine.comm.rendezvous import LOOPBACK, Rendezvous
from engine.config import ResolvedConfig
from engine.errors import CheckpointError, ConfigError, EngineDeadError
from engine.ranks.messages import Dead, Failed, FromRanks
from engine.ranks.nodes import RemoteRank, meet
from engine.shape import ModelShape
from engine.workers import Place, RankChannels, rank_main

_USER_ERRORS = {"ConfigError": ConfigError, "CheckpointError": CheckpointError}
_CLOSE_S = 10.0  # how long ranks may take to leave by themselves
_BLAME_S = 2.0  # how long to wait for the other ranks' reports after the first failure


class Processes:
    """Starts the ranks, passes messages, notices deaths.

    Attributes:
        outbox: pickled messages to rank 0; None ends the writer.
    """

    def __init__(self) -> None:
        self.outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._rendezvous: Rendezvous | None = None
        self._conns: list[Connection] = []
        self._processes: list[multiprocessing.process.BaseProcess | RemoteRank] = []
        self._remote: list[RemoteRank] = []
        self._threads: list[threading.Thread] = []
        self._killing = threading.Lock()
        self._closing = False

    def start(
        self, config: ResolvedConfig, shape: ModelShape, deliver: Callable[[FromRanks], None]
    ) -> None:
        """Starts the ranks; what they send goes to `deliver`, on the reader's thread. The last
        message of a group that died is Dead."""
        context = multiprocessing.get_context("spawn")
        host, remote = (LOOPBACK, {}) if config.ranks == "spawn" else meet(config)
        self._remote = list(remote.values())
        self._rendezvous = Rendezvous(host)
        local_pipes = {
            r: context.Pipe(duplex=False) for r in range(1, config.tp) if r not in remote
        }
        steps_out = [
            remote[r].steps if r in remote else local_pipes[r][1] for r in range(1, config.tp)
        ]
        for rank in range(config.tp):
            if rank in remote:
                self._processes.append(remote[rank])
                remote[rank].begin(config, shape, host, self._rendezvous.port)
                self._conns.append(remote[rank].caller)
                continue
            ours, theirs = context.Pipe()
            steps_in = local_pipes[rank][0] if rank else None
            channels = RankChannels(theirs, steps_in, [] if rank else steps_out)
            place = Place(rank, config.first_gpu + rank, host, self._rendezvous.port)
            process = context.Process(
                target=rank_main,
                args=(place, config, shape, channels),
                name=f"rangefinder-rank{rank}",
                daemon=True,
            )
            self._processes.append(process)
            process.start()
            theirs.close()  # so that each side sees the other's end
            self._conns.append(ours)
        for pipe in [*steps_out, *(pipe[0] for pipe in local_pipes.values())]:
            pipe.close()
        self._threads = [
            threading.Thread(target=self._read, args=(deliver,), name="rangefinder-reader"),
            threading.Thread(target=self._write, name="rangefinder-writer"),
        ]
        for thread in self._threads:
            thread.daemon = True
            thread.start()

    def close(self, farewell: bytes) -> None:
        """Sends the last message, kills the ranks that have not left after 10 s; repeatable."""
        self._closing = True
        self.outbox.put(farewell)
        deadline = time.monotonic() + _CLOSE_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """Ends what still runs; repeatable."""
        self._closing = True
        self._end_processes()
        self.outbox.put(None)
        for thread in self._threads:
            # The garbage collector may run anywhere, and an interrupt strike before a start.
            if thread is not threading.current_thread() and thread.is_alive():
                thread.join()
        for conn in [*self._conns, *(remote.sentinel for remote in self._remote)]:
            conn.close()

    def _end_processes(self) -> None:
        with self._killing:
            started = [process for process in self._processes if process.pid is not None]
            for process in started:
                if process.is_alive():
                    process.kill()
            for process in started:
                process.join()
            if self._rendezvous is not None:
                self._rendezvous.close()

    # -- threads ----------------------------------------------------------------------------------

    def _write(self) -> None:
        while (message := self.outbox.get()) is not None:
            try:
                self._conns[0].send_bytes(message)
            except OSError:
                return  # rank 0 is gone, which the reader sees too

    def _read(self, deliver: Callable[[FromRanks], None]) -> None:
        try:
            cause = self._cause(self._pass_on(deliver))
        except Exception as error:  # a message that cannot be unpickled: what follows is lost too
            self._end_processes()
            cause = error
        if not self._closing:
            deliver(Dead(cause))

    def _pass_on(self, deliver: Callable[[FromRanks], None]) -> list[Failed]:
        """Until a rank fails or ends; -> its report, if it left one."""
        sentinels = [process.sentinel for process in self._processes]
        while True:
            ready = wait([*self._conns, *sentinels])
            messages = [conn for conn in self._conns if conn in ready]
            if not messages:  # what a rank sent before its end was heard first
                return []
            for conn in messages:
                try:
                    message: FromRanks = conn.recv()
                except (EOFError, OSError):
                    return []
                if isinstance(message, Failed):
                    return [self._dated(message)]
                deliver(message)

    # -- failing ----------------------------------------------------------------------------------

    def _cause(self, failures: list[Failed]) -> Exception:
        """Finds the rank that failed first, and kills all, unless they were asked to leave."""
        if self._closing:
            return EngineDeadError(0, 0)
        deadline = time.monotonic() + _BLAME_S
        open_conns = list(self._conns)
        while open_conns and time.monotonic() < deadline:
            for conn in wait(open_conns, deadline - time.monotonic()):
                assert isinstance(conn, Connection)
                try:
                    message = conn.recv()
                except (EOFError, OSError):
                    open_conns.remove(conn)
                    continue
                if isinstance(message, Failed):
                    failures.append(self._dated(message))
        reported = {f.rank for f in failures}
        silent = [(r, p) for r, p in enumerate(self._processes) if r not in reported]
        for rank, process in silent:
            if self._conns[rank] not in open_conns:
                process.join(_BLAME_S)  # its end is on the way, from another node perhaps
        killed = [(rank, p.exitcode) for rank, p in silent if p.exitcode is not None]
        lost = [rank for rank, p in silent if isinstance(p, RemoteRank) and p.lost]
        self._end_processes()
        if lost and not killed:
            others = "\n".join(f.traceback for f in failures)
            return EngineDeadError(lost[0], None, others, lost=True)
        return _blame(failures, killed)

    def _dated(self, failure: Failed) -> Failed:
        """By this process' clock, where the rank's is another machine's."""
        remote = isinstance(self._processes[failure.rank], RemoteRank)
        return replace(failure, at_s=time.perf_counter()) if remote else failure


def _blame(failures: list[Failed], killed: list[tuple[int, int]]) -> Exception:
    """A rank that died without a word is the cause (its peers then fail in their collectives);
    otherwise the earliest report is."""
    if killed:
        rank, exitcode = killed[0]
        others = "\n".join(f.traceback for f in failures)
        return EngineDeadError(rank, exitcode, others)
    if not failures:
        return EngineDeadError(0, None, "the ranks closed their pipes and are still alive")
    first = min(failures, key=lambda f: f.at_s)
    if first.user_error is not None:
        name, message = first.user_error
        return _USER_ERRORS[name](message)
    return EngineDeadError(first.rank, None, first.traceback)
