"""What a step costs the host, as counts: linear in the batch, and the same in every context."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from functools import cache
from types import FrameType
from typing import Any

import pytest

from tests.support.host_steps import PAGE, HostSteps

LONGEST = 33_000
HEADER, ROW = 8 * 13, 41
"""Bytes of a message: step number, `plain` and eleven lengths; of a decoding sequence: token id and
seed of 8, five integers and a temperature of 4, a boolean."""


@cache
def counted(batch: int, context: int, depth: int) -> tuple[int, int, int]:
    """(calls, bytes allocated at most, bytes of the messages) of as many steps as a page has
    tokens, so that each sequence begins one page. Calls are those of Python functions and of C
    functions from Python."""
    host = HostSteps(batch, context, LONGEST, depth)
    calls = size = 0

    def count(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    host.run(PAGE)  # lists and dicts grow now and then
    gc.collect()  # what earlier tests left would be freed by calls that count
    gc.disable()
    sys.setprofile(count)
    for _ in range(PAGE):
        host.run(1)
        size += host.device.message_bytes
    sys.setprofile(None)
    tracemalloc.start()
    host.run(PAGE)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    gc.enable()
    return calls, peak, size


@pytest.mark.parametrize("depth", [1, 2])
def test_calls_of_a_step_are_linear_in_the_batch(depth: int) -> None:
    calls = {batch: counted(batch, 1024, depth)[0] / PAGE for batch in (16, 64, 256)}
    slope = (calls[64] - calls[16]) / 48
    assert (calls[256] - calls[64]) / 192 == pytest.approx(slope, rel=0.02)
    # Of a sequence 39, with a step in flight 47; of a step alone 219 and 225 (Python 3.11).
    assert slope < 50
    assert calls[16] - 16 * slope < 250


@pytest.mark.parametrize("depth", [1, 2])
def test_calls_and_bytes_of_a_step_are_those_of_every_context(depth: int) -> None:
    short, *longer = (counted(16, context, depth) for context in (1024, 8192, 32_000))
    for calls, peak, message in longer:
        assert calls == short[0]
        assert message == short[2]
        # 31,000 tokens more are 1,936 pages a sequence, 20 % of the peak at a byte a page. It moves
        # by 1 % with the values of integers and with what other threads of the process do.
        assert peak == pytest.approx(short[1], rel=0.05)


def test_a_message_has_41_bytes_a_sequence_and_4_a_page() -> None:
    for batch in (1, 16, 256):
        assert counted(batch, 1024, 2)[2] == PAGE * (HEADER + ROW * batch) + 4 * batch
