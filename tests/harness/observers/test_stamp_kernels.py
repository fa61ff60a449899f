"""The timestamp kernels in Triton's interpreter, with a clock that the test sets: rows and slots
are checked here, the register itself in tests/gpu/."""

from __future__ import annotations

import itertools
from types import ModuleType

import pytest
import torch

from tests.support.interpreter import require_interpreter

require_interpreter()


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """harness.observers.stamp_kernels whose clock reads 100, 110, 120, ..."""
    from harness.observers import stamp_kernels

    clock = itertools.count(100, 10)
    monkeypatch.setattr(stamp_kernels, "_now", lambda: next(clock))
    return stamp_kernels


def test_stamps_go_to_their_row_and_slot_and_the_ring_wraps(kernels: ModuleType) -> None:
    stamps = kernels.Stamps(rows=3, slots=5, device="cpu")
    before = stamps.read().max()  # building the kernels has run each once
    for _ in range(4):
        stamps.begin()
        stamps.stamp(3)
        stamps.stamp(1)
    table = stamps.read()
    first = int(table[1, 0])
    assert first > before
    step = [first, first + 20, first + 10]  # slots 0, 1, 3
    assert table[1][[0, 1, 3]].tolist() == step
    assert table[2][[0, 1, 3]].tolist() == [t + 30 for t in step]
    assert table[0][[0, 1, 3]].tolist() == [t + 60 for t in step]  # the fourth row is the first


def test_a_spin_lasts_as_long_as_it_is_told(kernels: ModuleType) -> None:
    spin = kernels.Spin("cpu")
    for ns in (75, 5000):
        spin.set_ns(ns)
        begin = kernels._now() + 10
        spin()
        ended = int(spin._ns[1])
        assert begin + ns <= ended <= begin + ns + 10


def test_the_tick_is_the_smallest_step_that_is_not_none(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    stamps = kernels.Stamps(rows=2, slots=4, device="cpu")
    clock = itertools.count(0, 300)
    monkeypatch.setattr(kernels, "_now", lambda: next(clock) // 1024 * 1024)
    assert stamps.tick_ns(count=50) == 1024
    monkeypatch.setattr(kernels, "_now", lambda: 7)
    with pytest.raises(RuntimeError, match="did not move in 50 readings"):
        stamps.tick_ns(count=50)


def test_the_smallest_kernel_writes(kernels: ModuleType) -> None:
    nothing = kernels.Nothing("cpu")
    nothing._out.fill_(9)
    nothing()
    assert nothing._out.tolist() == [0] and nothing._out.dtype is torch.int64
