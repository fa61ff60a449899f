"""Processes that measure parts together, one a device; what fails costs one part.

A crew of several is connected by the engine's own communicator. The calling process holds no GPU
context and can end a crew whatever it is doing.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.comm.base import Communicator

START_S = 180.0
"""Until all have started: interpreter, torch, process group."""
CLOSE_S = 15.0

Measure = Callable[[str], Any]
"""Of one process: a part's name -> what it hands over; picklable."""
Report = Callable[[str, "list[Any] | None", "str | None", float], None]
"""(part, replies in order of rank, None where it failed; why; seconds it took)"""


@dataclass(frozen=True)
class Crew:
    """How the processes are made.

    Attributes:
        world: processes; path: how they are connected, None: one alone.
        device: cpu or cuda; the process of rank r has cuda:r.
        meter: (communicator, device) -> Measure, called in each process; picklable.
        part_s: longest time of a part.
    """

    world: int
    path: str | None
    device: str
    meter: Callable[[Any, str], Measure]
    part_s: float = 300.0

    def measure(
        self, parts: Sequence[str], report: Report, begins: Callable[[str], None] = lambda _: None
    ) -> None:
        """Every part ends in one call of `report`; after a failure fresh processes go on. `begins`
        is called before a part, for the first of a set of processes before these start."""
        left = list(parts)
        while left:
            begins(left[0])
            with _Shift(self) as shift:
                reason = shift.start()
                if reason is not None:  # none of them would fare better
                    for part in left:
                        report(part, None, reason, 0.0)
                    return
                while left:
                    part, begin = left.pop(0), time.monotonic()
                    replies, reason = shift.measure(part)
                    report(part, replies, reason, time.monotonic() - begin)
                    if reason is not None:
                        break
                    if left:
                        begins(left[0])
                else:
                    shift.close()


class _Shift:
    """One set of processes, alive; leaving the context ends them."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._rendezvous: Any = None
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._connections: list[Connection] = []

    def __enter__(self) -> _Shift:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        if self._rendezvous is not None:
            self._rendezvous.close()

    def start(self) -> str | None:
        """-> why they did not start."""
        port = None
        if self._crew.path is not None:
            from engine.comm.rendezvous import Rendezvous

            self._rendezvous = Rendezvous()
            port = self._rendezvous.port
        context = multiprocessing.get_context("spawn")
        for rank in range(self._crew.world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self._crew, port, theirs), name=f"calibration{rank}"
            )
            process.daemon = True
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
        return self._collect(START_S)[1]

    def measure(self, part: str) -> tuple[list[Any] | None, str | None]:
        """-> (replies in order of rank, None) or (None, reason)."""
        for connection in self._connections:
            connection.send(part)
        return self._collect(self._crew.part_s)

    def close(self) -> None:
        """Lets them leave in order."""
        for connection in self._connections:
            connection.send(None)
        wait([process.sentinel for process in self._processes], CLOSE_S)

    def _collect(self, limit_s: float) -> tuple[list[Any] | None, str | None]:
        deadline = time.monotonic() + limit_s
        replies: dict[int, Any] = {}
        while len(replies) < len(self._connections):
            open_ones = [c for r, c in enumerate(self._connections) if r not in replies]
            ready = wait(open_ones, deadline - time.monotonic())
            if not ready:
                return None, f"it took more than {limit_s:g} s"
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = self._connections.index(connection)
                try:
                    reply, reason = connection.recv()
                except (EOFError, OSError):
                    return None, self._death(rank)
                if reason is not None:
                    return None, reason if self._crew.world == 1 else f"rank {rank}: {reason}"
                replies[rank] = reply
        return [replies[rank] for rank in range(len(self._connections))], None

    def _death(self, rank: int) -> str:
        process = self._processes[rank]
        process.join(5)
        code = process.exitcode
        name = f" ({signal.Signals(-code).name})" if code is not None and code < 0 else ""
        return f"the process of rank {rank} ended with code {code}{name}"


def _serve(rank: int, crew: Crew, port: int | None, connection: Connection) -> None:
    """A process of the crew: says that it has started, then answers with (reply, reason)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller decides what Ctrl-C means
    os.dup2(2, 1)  # libraries print, and the caller's stdout is a table or JSON
    threading.Thread(target=_end_with_parent, daemon=True).start()
    from harness.measuring.failures import classify

    try:
        measure, comm = _begin(rank, crew, port)
    except BaseException as error:
        connection.send((None, classify(error).reason))
        return
    connection.send((None, None))
    while (part := connection.recv()) is not None:
        try:
            reply = measure(part)
        except BaseException as error:
            connection.send((None, classify(error).reason))
            # Not a return: a peer may sit in a collective that only this process's end will break.
            os._exit(1)
        connection.send((reply, None))
    if comm is not None:
        comm.barrier()  # no rank tears the group down while another still uses it
        comm.close()


def _begin(rank: int, crew: Crew, port: int | None) -> tuple[Measure, Communicator | None]:
    import torch

    from harness.machine.hardware import cpu_cores

    if crew.device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(max(1, cpu_cores() // crew.world))
    comm: Communicator | None = None
    if crew.path is not None:
        from engine.comm.ranks import connect_rank

        assert port is not None
        comm = connect_rank(rank, crew.world, crew.path, port)
    device = f"cuda:{rank}" if crew.device == "cuda" else "cpu"
    return crew.meter(comm, device), comm


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
