"""The folder of what is built once and kept, and what is said where it cannot be written"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.errors import ConfigError


class CacheError(ConfigError):
    """A cache that cannot be written; the text says where it is and what to set."""


def cache_root() -> Path:
    """Of built models and compile caches: $RANGEFINDER_CACHE, else $XDG_CACHE_HOME/rangefinder,
    else ~/.cache/rangefinder."""
    own = os.environ.get("RANGEFINDER_CACHE")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "rangefinder"


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turns what the system says of `folder`, below the cache, into a CacheError."""
    try:
        yield
    except OSError as error:
        raise CacheError(
            f"RANGEFINDER_CACHE={os.environ.get('RANGEFINDER_CACHE') or ''}: {folder} cannot be "
            f"written ({error.strerror or error}); set it to a folder that can"
        ) from error


def compile_cache(used: bool) -> Path:
    """Where compile caches of cache=warm stay; made now where one is `used`, not hours later in an
    engine.

    Raises:
        CacheError: it cannot be written.
    """
    folder = cache_root() / "compile"
    if used:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
    return folder
