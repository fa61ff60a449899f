"""The time that a run says is left."""

from __future__ import annotations

from harness.progress import Estimate, duration


def test_the_estimate_comes_from_what_this_run_took() -> None:
    estimate = Estimate(points=6, starts=2)
    assert estimate.left_s() is None
    estimate.started(10)
    estimate.ended(2)
    assert estimate.left_s() == 5 * 2 + 1 * 10
    estimate.ended(4)
    assert estimate.text() == "about 22 s left"  # 4 x 3 s + 10 s
    assert [duration(s) for s in (99, 100, 3540, 4800)] == ["99 s", "2 min", "59 min", "1 h 20 min"]
