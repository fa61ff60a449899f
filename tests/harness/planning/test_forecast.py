"""How long a plan may take: from which earlier points, and what stays unknown"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.planning.forecast import Forecast
from harness.planning.plan import Plan
from harness.planning.runs import create
from harness.sweep.point import status_only_tables
from harness.tables.point_files import write_point
from tests.support.plans import SURROUNDINGS, plan, sweep

ENVIRONMENT = {"fingerprint": "h"}


def earlier(
    results: Path, made: Plan, walls: dict[int, float], start_s: float | None = None,
    status: str = "ok", created: str = "2026-01-01",
) -> str:  # fmt: skip
    """A run in which the point of each batch of `walls` took so long, and its engine `start_s` (for
    the first of them); -> the run's name."""
    run = create(results, made)
    first = True
    for point in made.points:
        for process in range(point.cfg["measure"]["n_process"]):
            if point.axes["batch"] not in walls:
                continue
            out = run.begin(point, process)
            tables = status_only_tables(point, status, None, run_id=run.run_id, process=process,
                                        environment=ENVIRONMENT)  # fmt: skip
            if start_s is not None:
                key = {"run_id": run.run_id, "point_id": point.point_id, "process": process}
                row = {**key, "repeat": 0, "phase": "total", "shared": not first}
                seconds = start_s if first else 99.0  # of a shared engine, which counts once
                tables["phases"] = {k: [v] for k, v in {**row, "seconds": seconds}.items()}
            write_point(out, tables)
            wall = walls[point.axes["batch"]]
            run.finish(point, process, out, status=status, reason=None, wall_s=wall)
            first = False
    run.close()
    stored = json.loads((run.path / "plan.json").read_text())
    (run.path / "plan.json").write_text(json.dumps({**stored, "created_at": created}))
    return run.run_id


def seconds(forecast: Forecast) -> list[str]:
    return [forecast.cell(point) for point in forecast.plan.points]


def test_equal_points_and_starts_are_summed(tmp_path: Path) -> None:
    made = plan(sweep(batch=[1, 4]))
    name = earlier(tmp_path, made, {1: 10.0, 4: 12.5}, start_s=3.0)
    found = Forecast.of(made, tmp_path)
    assert seconds(found) == ["10.0", "12.5"]
    assert found.lines() == [f"about 26 s, by {name}"]


def test_fresh_engines_count_as_often_as_they_start(tmp_path: Path) -> None:
    earlier(tmp_path, plan(sweep(batch=[1])), {1: 10.0}, start_s=3.0)
    found = Forecast.of(plan(sweep({"measure__n_process": 5}, batch=[1])), tmp_path)
    assert seconds(found) == ["50.0"]
    assert found.lines()[0].startswith("about 65 s")


def test_without_earlier_runs_nothing_is_invented(tmp_path: Path) -> None:
    made = plan(sweep(batch=[1, 4]))
    found = Forecast.of(made, tmp_path / "nowhere")
    unknown = "time unknown: it is taken from earlier runs of this machine, and "
    assert (seconds(found), found.known) == (["unknown", "unknown"], False)
    assert found.lines() == [unknown + "there are none"]
    other = plan(sweep(batch=[1, 4]), surroundings={**SURROUNDINGS, "hardware": "another"})
    earlier(tmp_path, other, {1: 1.0, 4: 1.0}, start_s=1.0)
    assert Forecast.of(made, tmp_path).lines() == [unknown + "there are none"]
    earlier(tmp_path, plan(sweep({"tp": 2}, batch=[1, 4])), {1: 1.0, 4: 1.0}, start_s=1.0)
    assert Forecast.of(made, tmp_path).lines() == [unknown + "they hold none of these points"]


@pytest.mark.parametrize(
    "change",
    [{"batch": 8}, {"backend": "transformers"}, {"tp": 2}, {"compile": "layer"},
     {"workload__output_tokens": 64},
     {"measure__max_repeats": 20}, {"instrument": []}, {"model__path": "/elsewhere"}],
    ids=str,
)  # fmt: skip
def test_what_sets_the_time_must_be_equal(tmp_path: Path, change: dict[str, Any]) -> None:
    earlier(tmp_path, plan(sweep(batch=[1])), {1: 10.0})
    found = Forecast.of(plan(sweep({"batch": 1, **change})), tmp_path)
    assert seconds(found) == ["unknown"]


def test_the_nearest_is_taken_and_marked(tmp_path: Path) -> None:
    here = {"page_size": 32, "dtype": "float32"}
    earlier(tmp_path, plan(sweep({"page_size": 32}, batch=[1])), {1: 10.0}, created="2026-01-01")
    earlier(tmp_path, plan(sweep({"page_size": 64}, batch=[1])), {1: 20.0}, created="2026-01-02")
    found = Forecast.of(plan(sweep(here, batch=[1, 4])), tmp_path)
    assert seconds(found) == ["~10.0", "unknown"]
    assert found.lines()[0].startswith("more than 10 s, by adhoc-")
    assert found.lines()[0].endswith("; unknown: 1 of 2 points, 1 of 1 engine starts")
    assert found.lines()[1] == "~ 1 of the points by one that differs in other settings"


def test_of_equal_ones_the_newest_is_taken(tmp_path: Path) -> None:
    made = plan(sweep(batch=[1]))
    earlier(tmp_path, made, {1: 30.0}, created="2026-01-02")
    earlier(tmp_path, made, {1: 20.0}, created="2026-01-01")
    assert seconds(Forecast.of(made, tmp_path)) == ["30.0"]


@pytest.mark.parametrize("status", ["error", "killed", "oom", "timeout", "skipped"])
def test_how_long_a_failure_took_says_nothing(tmp_path: Path, status: str) -> None:
    made = plan(sweep(batch=[1]))
    earlier(tmp_path, made, {1: 600.0}, status=status)
    assert seconds(Forecast.of(made, tmp_path)) == ["unknown"]


def test_damaged_files_are_passed_over(tmp_path: Path) -> None:
    made = plan(sweep(batch=[1, 4]))
    name = earlier(tmp_path, made, {1: 10.0, 4: 12.0}, start_s=2.0)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "plan.json").write_text("[1]")
    (tmp_path / "other").mkdir()
    foreign = {"surroundings": {"hardware": "h"}, "created_at": "2027", "points": [{"cfg": 3}]}
    (tmp_path / "other" / "plan.json").write_text(json.dumps(foreign))
    first = made.points[0].point_id
    (tmp_path / name / "points" / first / "point.json").write_text('{"status": "ok"}')
    (tmp_path / name / "points" / first / "phases.parquet").write_bytes(b"PAR1")
    found = Forecast.of(made, tmp_path)
    assert seconds(found) == ["unknown", "12.0"]
    assert "1 of 2 points, 1 of 1 engine starts" in found.lines()[0]


def test_skipped_points_take_no_time(tmp_path: Path) -> None:
    rules = [{"when": {"batch": 4}, "reason": "known"}]
    made = plan(sweep({"skip": rules}, batch=[1, 4]))
    earlier(tmp_path, made, {1: 10.0}, start_s=3.0)
    found = Forecast.of(made, tmp_path)
    assert (seconds(found), found.lines()[0][:10]) == (["10.0", ""], "about 13 s")
    rules = [{"when": {"batch": [1, 4]}, "reason": "known"}]
    assert Forecast.of(plan(sweep({"skip": rules}, batch=[1, 4])), tmp_path).lines() == []
