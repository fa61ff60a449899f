from __future__ import annotations

from itertools import count

import pytest

from harness.observers import clocks


def test_tick_is_the_smallest_step_of_the_clock() -> None:
    readings = iter([0, 0, 0, 1024, 1024, 3072, 4096, 4096])
    assert clocks.tick_ns(samples=8, clock=lambda: next(readings)) == 1024


def test_a_clock_that_stands_still_is_an_error() -> None:
    with pytest.raises(ValueError, match="did not move in 10 readings"):
        clocks.tick_ns(samples=10, clock=lambda: 5)


def test_floor_is_the_median_after_the_cold_tenth() -> None:
    calls = count()
    assert clocks.floor_ns(lambda: 10_000 if next(calls) < 100 else 40, samples=1000) == 40
    values = iter([9, 9] + [10, 20, 30] * 6)
    assert clocks.floor_ns(lambda: next(values), samples=20) == 20


def test_the_tick_of_this_machine() -> None:
    assert 0 < clocks.tick_ns() < 1_000_000
