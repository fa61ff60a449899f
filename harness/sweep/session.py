"""One engine alive in a child process, as its parent sees it: start, measure, end."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from harness.planning.plan import Point
from harness.sweep.worker import (
    Close,
    Done,
    Failed,
    Functions,
    MeasurePoint,
    Progress,
    Started,
    StartEngine,
    serve,
)

LOG_TAIL_BYTES = 3000
CLOSE_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Outcome:
    """How a point ended.

    Attributes:
        has_tables: the child wrote the point's tables; else the parent must.
        engine_alive: the engine can measure the next point.
    """

    status: str
    reason: str | None = None
    traceback: str | None = None
    has_tables: bool = False
    engine_alive: bool = False


class Session:
    """Starts its child at once; `start` then brings up the engine in it.

    Where an outcome's engine is not alive, call `kill`. `close` and `kill` are repeatable, and
    after either nothing of the child is left, ranks included.

    Args:
        log: file for what the child and its ranks print.
        functions: what the child calls.
        on_progress: called with a few words while the child works.
    """

    def __init__(
        self,
        log: Path,
        functions: Functions,
        on_progress: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.log = log
        self.on_progress = on_progress
        self._ooms = _kernel_oom_kills()
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        # Not a daemon: those may not have children, and ranks are children.
        self._process = context.Process(
            target=serve, args=(theirs, functions, str(log)), name="engine", daemon=False
        )
        self._spawned_s = time.perf_counter()
        self._process.start()
        self._reaped = False
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def start(self, cfg: dict[str, Any], cache_dir: Path | None, timeout_s: float) -> Outcome:
        """Brings up the engine of a resolved configuration; status ok if it serves."""
        message = StartEngine(cfg, None if cache_dir is None else str(cache_dir), self._spawned_s)
        outcome = self._ask(message, timeout_s, "measure.startup_timeout_s")
        if outcome.status == "ok":
            return outcome
        reason = f"the engine did not start: {outcome.reason}"
        return Outcome(outcome.status, reason, outcome.traceback)

    def measure(self, point: Point, process: int, out_dir: Path, timeout_s: float) -> Outcome:
        """Measures one point into `out_dir`."""
        message = MeasurePoint(point, str(out_dir), process)
        return self._ask(message, timeout_s, "measure.point_timeout_s")

    def close(self) -> None:
        """Lets the engine end in order, within 30 s; then as `kill`."""
        with contextlib.suppress(OSError):
            self._connection.send(Close())
            wait([self._process.sentinel], CLOSE_TIMEOUT_S)
        self.kill()

    def kill(self) -> None:
        """Ends the child and its ranks now."""
        self._end_group()
        self._connection.close()

    def _ask(self, message: StartEngine | MeasurePoint, timeout_s: float, limit: str) -> Outcome:
        try:
            self._connection.send(message)
        except OSError:
            return self._ended()
        deadline = time.monotonic() + timeout_s
        last = "no progress reported"
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                return self._timed_out(f"{limit}={timeout_s:g} passed; {last}")
            ready = wait([self._connection, self._process.sentinel], timeout=left)
            try:
                if not self._connection.poll():
                    if self._process.sentinel in ready:
                        return self._ended()
                    continue
                reply = self._connection.recv()
            except (EOFError, OSError):
                return self._ended()
            if isinstance(reply, Progress):
                last = f"last seen at: {reply.text}"
                self.on_progress(reply.text)
            elif isinstance(reply, Failed):
                return Outcome(reply.status, reply.reason, reply.traceback)
            elif isinstance(reply, Done):
                return Outcome(
                    reply.status, reply.reason, has_tables=True, engine_alive=reply.engine_alive
                )
            else:
                assert isinstance(reply, Started)
                return Outcome("ok", engine_alive=True)

    def _timed_out(self, reason: str) -> Outcome:
        size = self._log_size()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)  # its threads' stacks go to the log
            self._await_log(size)
        return Outcome("timeout", reason, self._tail())

    def _await_log(self, size: int) -> None:
        """Returns when the log has outgrown `size` and stopped growing, or the child has ended; on
        a busy machine that takes seconds. 10 at most: it may hang where no signal is heard."""
        seen, deadline = size, time.monotonic() + 10
        while time.monotonic() < deadline and not wait([self._process.sentinel], 0.2):
            now = self._log_size()
            if now == seen > size:
                return
            seen = now

    def _log_size(self) -> int:
        return self.log.stat().st_size if self.log.exists() else 0

    def _ended(self) -> Outcome:
        """The child is gone without a word: by a signal, or by an exit of a library."""
        wait([self._process.sentinel], 5)
        code = self._end_group()
        if code >= 0:
            return Outcome("error", f"the engine's process ended with code {code}", self._tail())
        name = signal.Signals(-code).name
        if name == "SIGKILL" and _kernel_oom_kills() > self._ooms:
            return Outcome("oom", "the kernel killed it: no memory left (SIGKILL)", self._tail())
        return Outcome("killed", f"the engine's process was ended by {name}", self._tail())

    def _end_group(self) -> int:
        """Ends the child and its ranks, if they have not ended; returns the child's exit code."""
        if not self._reaped:
            # The group first: only an unreaped child still owns its number.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.kill()  # in case it had not yet made a group of its own
            self._process.join()
            self._reaped = True
        code = self._process.exitcode
        assert code is not None
        return code

    def _tail(self) -> str:
        """The end of what the child printed."""
        try:
            return self.log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
        except OSError:
            return ""


def _kernel_oom_kills() -> int:
    """Processes killed for memory since this kernel started; 0 where it does not say."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    counts = (line.split() for line in lines if line.startswith("oom_kill "))
    return next((int(fields[1]) for fields in counts), 0)
