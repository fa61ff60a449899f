"""Errors that a user of the engine can meet. Each names the value, the limit and what to do."""

from __future__ import annotations


class ConfigError(ValueError):
    """An engine configuration that cannot run; raised before a process or a weight is touched."""


class RequestError(ValueError):
    """One request that cannot be served. It fails alone: other requests are not touched."""


class CheckpointError(ValueError):
    """A checkpoint whose tensors do not fill the model exactly."""


class EngineDeadError(RuntimeError):
    """A rank raised or died; the engine is closed and cannot be used again.

    Attributes:
        rank: the rank that failed first.
        exitcode: its exit code (negative: the signal that ended it), or None if it raised, or if
            nobody can tell.
        worker_traceback: that rank's traceback as text, empty if it was killed.
    """

    def __init__(
        self, rank: int, exitcode: int | None, worker_traceback: str = "", lost: bool = False
    ) -> None:
        what = f"ended with exit code {exitcode}" if exitcode is not None else "raised"
        if lost:
            what = "is lost: its node or the process that torchrun started there is gone"
        super().__init__(f"rank {rank} {what}; the engine is closed\n{worker_traceback}".rstrip())
        self.rank = rank
        self.exitcode = exitcode
        self.lost = lost
        self.worker_traceback = worker_traceback

    def __reduce__(self) -> tuple[type, tuple[int, int | None, str, bool]]:
        return type(self), (self.rank, self.exitcode, self.worker_traceback, self.lost)
