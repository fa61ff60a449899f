"""What an exception means for a point: its status, a reason in one line, and the traceback."""

from __future__ import annotations

import os
import re
import signal
import stat
import traceback as tb
from dataclasses import dataclass
from pathlib import Path

_OOM = re.compile(
    r"OutOfMemoryError|out of memory|MemoryError|can't allocate memory|cannot allocate memory",
    re.IGNORECASE,
)
_TIMEOUT = re.compile(r"TimeoutError|timed out|watchdog caught collective", re.IGNORECASE)
_WATCHDOG = re.compile(r"watchdog caught collective[^\n]*", re.IGNORECASE)
_TAIL_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class Failure:
    status: str
    reason: str
    traceback: str
    engine_alive: bool


def classify(error: BaseException) -> Failure:
    """oom: memory ran out in this process or a rank's; timeout: something was waited for in vain;
    killed: a rank was ended by a signal, which the reason names; error: all else."""
    worker = str(getattr(error, "worker_traceback", ""))
    exitcode = getattr(error, "exitcode", None)
    waited = _WATCHDOG.search(_printed()) if exitcode == -signal.SIGABRT else None
    dead = type(error).__name__ == "EngineDeadError"
    text = worker or f"{type(error).__name__}: {error}"
    if isinstance(error, MemoryError) or _OOM.search(_last_lines(text)):
        status = "oom"
    elif waited or isinstance(error, TimeoutError) or _TIMEOUT.search(_last_lines(text)):
        status = "timeout"
    elif isinstance(exitcode, int) and exitcode < 0:
        status = "killed"
    else:
        status = "error"
    return Failure(
        status=status,
        reason=_reason(error, worker, exitcode) + (f": {waited[0]}" if waited else ""),
        traceback=worker or "".join(tb.format_exception(error)),
        engine_alive=not dead,
    )


def _printed() -> str:
    """The end of what this process and its ranks printed, where that goes to a file, as in a
    session. NCCL's watchdog says there what it waited for, and aborts its process without a
    traceback."""
    try:
        if not stat.S_ISREG(os.fstat(2).st_mode):
            return ""
        with Path("/proc/self/fd/2").open("rb") as log:
            log.seek(max(0, os.fstat(2).st_size - _TAIL_BYTES))
            return log.read().decode(errors="replace")
    except OSError:
        return ""


def _last_lines(text: str) -> str:
    """The exception's own words: a traceback shows source lines above them that prove nothing."""
    lines = text.strip().splitlines()
    ends = [i for i, line in enumerate(lines) if line.startswith(" ")]
    return "\n".join(lines[ends[-1] + 1 :] if ends else lines)


def _reason(error: BaseException, worker: str, exitcode: int | None) -> str:
    if isinstance(exitcode, int) and exitcode < 0:
        name = signal.Signals(-exitcode).name if -exitcode in set(signal.Signals) else "unknown"
        hint = "; the kernel sends it when memory runs out" if name == "SIGKILL" else ""
        return f"rank {getattr(error, 'rank', '?')} was ended by signal {-exitcode} ({name}){hint}"
    if worker:
        words = _last_lines(worker).splitlines()
        return f"rank {getattr(error, 'rank', '?')}: {words[0] if words else 'unknown'}"
    words = str(error).strip().splitlines()
    name = type(error).__name__
    return f"{name}: {words[0]}" if words else name
