"""What processes of tests that run side by side make once: one writes, the others wait for it."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager

from harness.machine.cache import cache_root


@contextmanager
def one_at_a_time(name: str) -> Iterator[None]:
    """Whoever comes later, in this process or in another, waits until the context is left or its
    process has ended. `harness.machine.models.built` inside it writes once; without it each process
    would write a copy of its own and all but one would be thrown away."""
    cache_root().mkdir(parents=True, exist_ok=True)
    with (cache_root() / f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
