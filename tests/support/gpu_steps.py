"""Steps launched on a FakeGpu, and how long its observers say that collectives took."""

from __future__ import annotations

from typing import Any

from engine.comm.types import Kind, ObserverContext
from harness.observers.records import RankRecord
from tests.support.fake_gpu import GpuCommunicator, collectives, info

STEP = [5000] * 5 + [7000] * 2
"""ns of each collective of a step of two layers: all-reduces, the gather, the broadcast."""


def rehearse(kind: Kind, nbytes: int, dtype: str) -> Any:
    """No test but one asks for it."""
    return lambda: None


def context(align: Any = lambda: None) -> ObserverContext:
    return ObserverContext(0, 2, "cuda:0", align, rehearse)


def launched(comm: GpuCommunicator, number: int, mode: str = "eager", layers: int = 2) -> None:
    """A step of 100 ns and its collectives."""
    comm.step_begin(info(number, mode=mode))
    comm.gpu.work(100)
    collectives(comm, layers=layers)
    comm.step_end(info(number, mode=mode))


def pairs(record: RankRecord) -> list[int]:
    """ns between the two readings of each collective."""
    return (record.collectives["after_ns"] - record.collectives["before_ns"]).tolist()
