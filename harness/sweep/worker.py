"""The child process of a session: it owns one engine and obeys the messages of its parent."""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from harness.planning.plan import Point


@dataclass(frozen=True)
class Functions:
    """What the child calls, as `module:function`, so that it is imported there alone.

    create(name) -> harness.backends.Backend, not started; name: one of harness.backends.NAMES.
    measure(backend, point, out_dir, progress, process=n) -> harness.sweep.point.PointOutcome; it
    leaves the point's tables in out_dir and calls progress(text) now and then.
    """

    create: str = "harness.backends:create"
    measure: str = "harness.sweep.point:measure_point"


@dataclass(frozen=True)
class StartEngine:
    """`since_s`: perf_counter of the parent when it started this process, from which the engine's
    start counts; processes of one host share that clock."""

    cfg: dict[str, Any]
    cache_dir: str | None
    since_s: float


@dataclass(frozen=True)
class MeasurePoint:
    point: Point
    out_dir: str
    process: int


@dataclass(frozen=True)
class Close:
    pass


@dataclass(frozen=True)
class Started:
    pass


@dataclass(frozen=True)
class Progress:
    text: str


@dataclass(frozen=True)
class Done:
    """The point has its tables. `engine_alive`: the engine can measure the next one."""

    status: str
    reason: str | None
    engine_alive: bool


@dataclass(frozen=True)
class Failed:
    """Nothing more is to be expected of this engine; the point has no tables."""

    status: str
    reason: str
    traceback: str


def serve(connection: Connection, functions: Functions, log: str) -> None:
    """Entry of the child: a session of its own (so that Ctrl-C reaches only the parent, and one
    signal ends it with all its ranks), output to `log`, then messages until Close or the end of
    the parent."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _redirect_output(Path(log))
    threading.Thread(target=_end_with_parent, name="watchdog", daemon=True).start()
    backend: Any = None
    try:
        while True:
            message = connection.recv()
            if isinstance(message, Close):
                break
            try:
                if isinstance(message, StartEngine):
                    backend = _load(functions.create)(message.cfg["backend"])
                    backend.start(message.cfg, message.cache_dir, message.since_s)
                    connection.send(Started())
                else:
                    connection.send(_measure(functions, backend, message, connection))
            except BaseException as error:
                connection.send(_failed(error))
    except EOFError:
        pass  # the parent has gone; the watchdog is on its way
    finally:
        if backend is not None:
            backend.close()


def _measure(
    functions: Functions, backend: Any, message: MeasurePoint, connection: Connection
) -> Done:
    measure = _load(functions.measure)
    outcome = measure(
        backend,
        message.point,
        Path(message.out_dir),
        lambda text: connection.send(Progress(text)),
        process=message.process,
    )
    return Done(outcome.status, outcome.reason, outcome.engine_alive)


def _failed(error: BaseException) -> Failed:
    from harness.measuring.failures import classify

    failure = classify(error)
    return Failed(failure.status, failure.reason, failure.traceback)


def _load(dotted: str) -> Callable[..., Any]:
    module, _, name = dotted.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def _redirect_output(log: Path) -> None:
    """Sends what this process and its ranks print, from C as well, to a file; SIGUSR1 adds where
    every thread stands."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    faulthandler.enable(file=sys.stderr)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)


def _end_with_parent() -> None:
    """Ends this process and its ranks as soon as the parent is gone, whatever they are doing."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.killpg(0, signal.SIGKILL)
