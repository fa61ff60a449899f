"""What an exception means for a point: its status, a reason in one line, and the traceback."""

from __future__ import annotations

import re
import signal
import traceback as tb
from dataclasses import dataclass

_OOM = re.compile(
    r"OutOfMemoryError|out of memory|MemoryError|can't allocate memory|cannot allocate memory",
    re.IGNORECASE,
)
_TIMEOUT = re.compile(r"TimeoutError|timed out|watchdog caught collective", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Failure:
    status: str
    reason: str
    traceback: str
    engine_alive: bool


def classify(error: BaseException) -> Failure:
    """oom: memory ran out in this process or a rank's; timeout: something was waited for in vain;
    error: all else. A rank ended by a signal is an error whose reason names the signal."""
    worker = str(getattr(error, "worker_traceback", ""))
    exitcode = getattr(error, "exitcode", None)
    dead = type(error).__name__ == "EngineDeadError"
    text = worker or f"{type(error).__name__}: {error}"
    if isinstance(error, MemoryError) or _OOM.search(_last_lines(text)):
        status = "oom"
    elif isinstance(error, TimeoutError) or _TIMEOUT.search(_last_lines(text)):
        status = "timeout"
    else:
        status = "error"
    return Failure(
        status=status,
        reason=_reason(error, worker, exitcode),
        traceback=worker or "".join(tb.format_exception(error)),
        engine_alive=not dead,
    )


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
