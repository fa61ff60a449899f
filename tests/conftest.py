"""What holds for every test: no network, and `gpu` tests are skipped where there is none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator

import pytest

# Before transformers is imported anywhere: a test that would ask a hub fails, here as in CI.
os.environ["HF_HUB_OFFLINE"] = "1"

# Of this process alone: tests that run side by side (-n 2) do not wait for each other's runs, nor
# for a user's. Within one process they hold the locks as users do.
_LOCKS = tempfile.TemporaryDirectory(prefix="rangefinder-locks-")
os.environ["RANGEFINDER_LOCKS"] = _LOCKS.name


def pytest_configure() -> None:
    """A shell starts its background jobs with SIGINT ignored, and their children inherit that; the
    tests that interrupt something need it to be what it is in a terminal."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """A command ignores signals from its interrupt to its end, which within a test is not the end
    of the process: the next test would hand that on to what it starts. Of the whole protocol, so
    that what a module's fixture runs counts too."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return (yield)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; none is visible"))


@pytest.fixture
def foreign_pid() -> Iterator[int]:
    """A process that is not of this one's session. Process 1 would not do: in a container it is
    often what runs the tests."""
    command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as process:
        yield process.pid
        assert process.stdin is not None
        process.stdin.close()
