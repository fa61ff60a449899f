"""The file system below a run: its lock, room to write, what is set aside."""

from __future__ import annotations

import errno
import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SET_ASIDE = "set-aside"
"""Folder of a run for what was found in it and is not of it; nobody reads or deletes it."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_REMEDIES = {
    errno.ENOSPC: "make room on that disk",
    errno.EDQUOT: "free some of the quota",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
    errno.EROFS: "make it writable",
    errno.EACCES: "make it writable",
    errno.EPERM: "make it writable",
}
_FULL_WORDS = re.compile("|".join(re.escape(os.strerror(number)) for number in _FULL))


class StorageError(RuntimeError):
    """A run folder that cannot be written; the text says why and what to do."""


@contextmanager
def storing(path: Path) -> Iterator[None]:
    """Turns what the system says of a write below `path` into a StorageError."""
    try:
        yield
    except OSError as error:
        what = error.strerror or str(error)
        raise StorageError(f"{path} cannot be written: {what}; {remedy(error.errno)}") from error


def remedy(number: int | None) -> str:
    """What to do about an error of this number, for whoever reads it."""
    known = _REMEDIES.get(number or 0)
    again = "the same command continues this run"
    return f"{known}, then {again}" if known else f"once it can be, {again}"


def check_room(path: Path, reason: str | None) -> None:
    """Whether a point failed since a disk is full or a quota used up, by the words of its reason.
    The points after it would end in the same way, after hours of measuring for nothing.

    Raises:
        StorageError: it did.
    """
    said = _FULL_WORDS.search(reason or "")
    if said is not None:
        number = next(number for number in _FULL if os.strerror(number) == said[0])
        raise StorageError(f"{path} cannot be written: {reason}; {remedy(number)}")


def try_lock(folder: Path) -> int | None:
    """A file descriptor that holds the folder's lock, or None if another process does.

    The kernel keeps the lock (flock) with the open file, not with a process's number, and frees it
    when that process ends in whatever way: a lock cannot be stale, and what is in the file is of no
    account.
    """
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def set_aside(run: Path, path: Path) -> Path:
    """Moves `path` out of the way, within its run; returns where it is now."""
    folder = run / SET_ASIDE
    folder.mkdir(exist_ok=True)
    number = 1
    while os.path.lexists(target := folder / f"{path.name}.{number}"):
        number += 1
    path.rename(target)
    return target
