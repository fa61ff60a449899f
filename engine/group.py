"""The caller's side of tp > 1: starts the ranks, passes messages, notices deaths."""

from __future__ import annotations

import multiprocessing
import time
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

from engine.comm.rendezvous import Rendezvous
from engine.config import ResolvedConfig
from engine.errors import CheckpointError, ConfigError, EngineDeadError
from engine.messages import Abort, Close, Control, Failed, Finished, Ready, Reply, Submit
from engine.request import Request
from engine.shape import ModelShape
from engine.workers import RankChannels, rank_main

_USER_ERRORS = {"ConfigError": ConfigError, "CheckpointError": CheckpointError}
_CLOSE_S = 10.0  # how long ranks may take to leave by themselves
_BLAME_S = 2.0  # how long to wait for the other ranks' reports after the first failure


class RankGroup:
    """The ranks of one engine, each a spawned process.

    Attributes:
        startup: seconds; load and warm-up are the slowest rank's.
        effective: rank 0's effective configuration.

    Raises (every method but close):
        EngineDeadError: a rank raised or died; all are killed, and later calls raise it again.
        ConfigError, CheckpointError: a rank found it while starting.
    """

    def __init__(self, config: ResolvedConfig, shape: ModelShape) -> None:
        begin = time.perf_counter()
        self._error: Exception | None = None
        self._closed = False
        self._finished: list[Request] = []
        self._conns: list[Connection] = []
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._rendezvous = Rendezvous()
        try:
            self._spawn(config, shape)
            spawned = time.perf_counter()
            ready: list[Ready] = self._collect(Ready)
        except BaseException:  # an interrupt included: no rank may outlive a failed start
            self._kill()
            raise
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

    def _spawn(self, config: ResolvedConfig, shape: ModelShape) -> None:
        context = multiprocessing.get_context("spawn")
        step_pipes = [context.Pipe(duplex=False) for _ in range(config.tp - 1)]
        for rank in range(config.tp):
            ours, theirs = context.Pipe()
            steps_in = step_pipes[rank - 1][0] if rank else None
            steps_out = [] if rank else [pipe[1] for pipe in step_pipes]
            channels = RankChannels(theirs, steps_in, steps_out)
            process = context.Process(
                target=rank_main,
                args=(rank, config, shape, self._rendezvous.port, channels),
                name=f"rangefinder-rank{rank}",
                daemon=True,
            )
            self._processes.append(process)
            process.start()
            theirs.close()  # so that each side sees the other's end
            self._conns.append(ours)
        for pipe in step_pipes:
            pipe[0].close()
            pipe[1].close()

    def submit(self, requests: list[Request]) -> None:
        self._send(Submit(tuple(requests)))

    def abort(self, request_id: str) -> None:
        self._send(Abort(request_id))

    def poll(self, timeout_s: float | None) -> list[Request]:
        """Requests that ended since the last call; waits for the first one at most `timeout_s`."""
        self._check()
        if not self._finished:
            self._receive(timeout_s, until=Finished)
        finished, self._finished = self._finished, []
        return finished

    def control(self, message: Control) -> list[Any]:
        """Every rank acts on `message` between the same two steps; replies in order of rank."""
        self._send(message)
        return [reply.value for reply in self._collect(Reply)]

    def close(self) -> None:
        """Asks the ranks to leave, kills those that have not after 10 s; repeatable."""
        if self._closed:
            return
        self._closed = True
        if self._error is None:
            with suppress(OSError):  # rank 0 is gone already; the others are killed below
                self._conns[0].send(Close())
        deadline = time.monotonic() + _CLOSE_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self._kill()
        for conn in self._conns:
            conn.close()

    # -- receiving --------------------------------------------------------------------------------

    def _send(self, message: Submit | Abort | Control) -> None:
        self._check()
        try:
            self._conns[0].send(message)
        except OSError:
            self._fail([])

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closed:
            raise RuntimeError("the engine is closed")

    def _collect(self, kind: type) -> list[Any]:
        """One message of `kind` from each rank, in order of rank."""
        messages: dict[int, Any] = {}
        while len(messages) < len(self._conns):
            for message in self._receive(None, until=kind):
                messages[message.rank] = message
        return [messages[rank] for rank in range(len(self._conns))]

    def _receive(self, timeout_s: float | None, until: type) -> list[Any]:
        """Waits until at least one message of type `until` has come; finished requests are kept."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        sentinels = [p.sentinel for p in self._processes]
        wanted: list[Any] = []
        while not wanted:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = wait([*self._conns, *sentinels], left)
            if not ready:
                return wanted
            for conn in self._conns:
                if conn in ready:
                    self._read(conn, until, wanted)
            if not wanted and any(s in ready for s in sentinels):
                self._fail([])
        return wanted

    def _read(self, conn: Connection, until: type, wanted: list[Any]) -> None:
        try:
            message = conn.recv()
        except (EOFError, OSError):
            self._fail([])
        if isinstance(message, Failed):
            self._fail([message])
        if isinstance(message, Finished):
            self._finished.extend(message.requests)
        if isinstance(message, until):
            wanted.append(message)

    # -- failing ----------------------------------------------------------------------------------

    def _fail(self, failures: list[Failed]) -> NoReturn:
        """Finds the rank that failed first, kills all, and raises."""
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
                    failures.append(message)
        reported = {f.rank for f in failures}
        killed = [
            (rank, process.exitcode)
            for rank, process in enumerate(self._processes)
            if rank not in reported and process.exitcode is not None
        ]
        self._kill()
        self._error = _blame(failures, killed)
        raise self._error

    def _kill(self) -> None:
        started = [process for process in self._processes if process.pid is not None]
        for process in started:
            if process.is_alive():
                process.kill()
        for process in started:
            process.join()
        self._rendezvous.close()


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
