"""The time that a run says is left."""

from __future__ import annotations

import io

from rich.console import Console

from harness.planning.forecast import duration
from harness.planning.plan import Plan
from harness.sweep.progress import Estimate, Reporter
from tests.support.fake_backend import make_cfg, make_point


def test_the_estimate_comes_from_what_this_run_took() -> None:
    estimate = Estimate(points=6, starts=2)
    assert estimate.left_s() is None
    estimate.started(10)
    estimate.ended(2)
    assert estimate.left_s() == 5 * 2 + 1 * 10
    estimate.ended(4)
    assert estimate.text() == "about 22 s left"  # 4 x 3 s + 10 s
    assert [duration(s) for s in (99, 100, 3540, 4800)] == ["99 s", "2 min", "59 min", "1 h 20 min"]


def test_a_point_has_a_name_also_alone_and_without_instruments() -> None:
    said = io.StringIO()
    console = Console(file=said, width=200)
    one = make_point(make_cfg(tp=2, batch=4))
    bare = make_point(make_cfg(tp=2, batch=4, instrument=[]))
    for points in ([one], [bare, one]):
        plan = Plan("mine", "key", tuple(points), {})
        reporter = Reporter(plan, total=len(points), points=len(points), starts=1, console=console)
        for point in points:
            reporter.point_ended(point, "skipped", "no GPU", 0.0)
    assert said.getvalue().splitlines() == [
        "[1/1] tp=2 batch=4: skipped (no GPU)",
        "[1/2] instrument=none: skipped (no GPU)",
        "[2/2] instrument=collectives: skipped (no GPU)",
    ]
