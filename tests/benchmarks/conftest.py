"""How every benchmark is measured, and what a run of them must say of itself.

`measure(function, setup=..., rounds=...)` runs one untimed and then `rounds` timed rounds, waiting
for the device inside each. Without --benchmark-enable it runs the function once, as a test.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from tests.support.measuring import Measure, planted, slowed, synchronized
from tests.support.turns import Turns

MEASURED = pytest.StashKey[int]()
TURNS = pytest.StashKey[Turns | None]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--plant",
        action="append",
        default=[],
        metavar="NAME=FACTOR",
        help="make the benchmark NAME (all: every one) take FACTOR times its time, by waiting "
        "behind each round; shows that a gate finds it",
    )
    parser.addoption(
        "--turns",
        type=int,
        metavar="FD",
        help="of scripts/gate.py: begin each round when this socket says so",
    )


def pytest_configure(config: pytest.Config) -> None:
    descriptor = config.getoption("--turns", default=None)
    config.stash[TURNS] = None if descriptor is None else Turns(descriptor)


@pytest.fixture
def measure(benchmark: BenchmarkFixture, request: pytest.FixtureRequest) -> Measure:
    """measure(function, setup=None, rounds=20) -> what the function returned last. `setup`, if
    given, is called before each round, untimed, and returns the function's arguments."""
    config = request.config
    factor = planted(config.getoption("--plant", default=[]), benchmark.name)
    turns = config.stash.get(TURNS, None)
    timer = resolve_name(config.getoption("benchmark_timer"))
    # What two commits must have in common to be compared: the file that says what is measured.
    source = request.path.read_bytes()
    benchmark.extra_info["workload"] = hashlib.sha256(source).hexdigest()[:12]

    def run(
        function: Callable[..., Any], setup: Callable[[], Any] | None = None, rounds: int = 20
    ) -> Any:
        def prepare() -> tuple[tuple[Any, ...], dict[str, Any]] | None:
            if turns is not None:
                turns.wait(request.node.nodeid)
            return None if setup is None else ((setup(),), {})

        target = slowed(synchronized(function), factor, timer)
        result = benchmark.pedantic(target, setup=prepare, rounds=rounds, warmup_rounds=1)
        if benchmark.enabled:
            config.stash[MEASURED] = config.stash.get(MEASURED, 0) + 1
        return result

    return run


@pytest.fixture(autouse=True)
def by_measure(request: pytest.FixtureRequest) -> None:
    """pytest-benchmark's own fixture waits for no device, takes no turns with the other commit and
    does not say which file it is of: its times are none that a gate could judge."""
    if {"benchmark", "measure"} & set(request.fixturenames) == {"benchmark"}:
        pytest.fail(
            "a benchmark here takes the fixture measure, not benchmark: "
            "measure(function, setup=None, rounds=20) (docs/benchmarks.md)",
            pytrace=False,
        )


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """On a CPU that has other work a second intra-op thread waits for its core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A run that was asked for benchmarks and measured none has not passed."""
    config = session.config
    asked = config.getoption("benchmark_only") and not config.getoption("collectonly")
    if asked and not config.stash.get(MEASURED, 0) and session.exitstatus == pytest.ExitCode.OK:
        print("\nno benchmark was measured: each was left out or skipped", end="")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
