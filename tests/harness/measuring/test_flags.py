from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest

from engine.execution.steplog import STEP_DTYPE
from harness.measuring.flags import of_point, of_scaling
from harness.measuring.window import Window
from harness.observers.records import DECODE, PREFILL


def window(*steps: tuple[int, bool]) -> Window:
    """(phase, replayed) of each step."""
    log = np.zeros(len(steps), STEP_DTYPE)
    for row, (phase, replayed) in zip(log, steps, strict=True):
        row["phase"], row["replayed"] = phase, replayed
    return Window("plain", 0, [], (), [log], 0.0, 1.0, datetime.now(UTC), {})


def figure(name: str, value: float | None) -> dict[str, Any]:
    return {"name": name, "value": value}


def test_decode_steps_that_were_not_replayed_are_flagged() -> None:
    windows = [
        window((PREFILL, False), *[(DECODE, True)] * 8),
        window((PREFILL, False), (DECODE, True), (DECODE, False)),
    ]
    assert of_point(windows, [], graphs=True) == []  # 9 of 10
    windows.append(window((DECODE, False)))
    assert of_point(windows, [], graphs=True) == [
        "flag: 82% of 11 decode steps replayed a CUDA graph"
    ]
    assert of_point(windows, [], graphs=False) == []
    assert of_point([window((PREFILL, False))], [], graphs=True) == []


@pytest.mark.parametrize(("value", "flagged"), [(0.049, True), (0.05, False), (None, False)])
def test_a_step_far_from_the_bandwidth_is_flagged(value: float | None, flagged: bool) -> None:
    found = of_point([], [figure("mfu", 0.001), figure("mbu", value)], graphs=True)
    assert found == (["flag: a decode step uses 4.9% of the read bandwidth"] if flagged else [])


def test_collectives_longer_than_their_step_are_flagged() -> None:
    rows = [
        {"name": "comm_share", "value": value, "phase": phase, "ranks": ranks}
        for value, phase, ranks in (
            (1.14, "decode", "max"), (1.14, "decode", "0"), (1.3, None, "max"),
            (0.9, "decode", "max"),
        )
    ]  # fmt: skip
    assert of_point([], rows, graphs=False) == [
        "flag: collectives of the timed pass last 114% of a clean step"
    ]


@pytest.mark.parametrize(("efficiency", "flagged"), [(2.01, True), (1.16, True), (1.15, False),
                                                     (0.4, False), (None, False)])  # fmt: skip
def test_more_than_ranks_can_do_is_flagged(efficiency: float | None, flagged: bool) -> None:
    note = of_scaling(2, efficiency)
    words = f"flag: tp=2 does {efficiency:.2f} times what 2 engines of tp=1 do" if flagged else ""
    assert (note or "").startswith(words) and (note is not None) == flagged
