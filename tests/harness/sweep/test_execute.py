"""Running a plan: engines started, their caches, rows and lines written."""

from __future__ import annotations

import io
import json
import re
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from harness.planning.runs import open_run
from harness.sweep.execute import units
from tests.support.executions import go
from tests.support.fake_session import FakeSession
from tests.support.plans import plan, sweep

pytestmark = pytest.mark.usefixtures("sessions")

AXES = {
    "tp": [1, 2],
    "batch": [1, 4],
    "compile": ["off", "model"],
    "enforce_eager": [True, False],
}


@pytest.mark.parametrize("order", list(permutations(AXES))[::3], ids="-".join)
def test_starts_are_the_distinct_engines_for_axes_in_any_order(
    order: tuple[str, ...], tmp_path: Path, sessions: list[FakeSession]
) -> None:
    run = open_run(tmp_path, plan(sweep(**{axis: AXES[axis] for axis in order})), "auto")
    complete, execution = go(run)

    assert complete
    assert len(sessions) == execution.engine_starts == 4
    assert sorted((s.cfg["tp"], s.cfg["compile"]) for s in sessions) == [
        (1, "model"),
        (1, "off"),
        (2, "model"),
        (2, "off"),
    ]
    assert all(s.ended == "closed" and len(s.measured) == 2 for s in sessions)
    assert run.counts() == {"ok": 8, "skipped": 8}


def test_every_fresh_engine_of_a_point_leaves_rows_of_its_own(
    tmp_path: Path, sessions: list[FakeSession]
) -> None:
    configs = sweep({"measure__n_process": 3}, batch=[1, 2])
    configs += sweep({"measure__n_process": 3, "enforce_eager": False})
    configs += sweep({"measure__n_process": 2, "tp": 2})
    made = plan(configs)
    assert [(u.point.index, u.process) for u in units(made)] == [
        (0, 0), (1, 0), (2, 0), (3, 0), (0, 1), (1, 1), (3, 1), (0, 2), (1, 2)
    ]  # fmt: skip
    run = open_run(tmp_path, made, "auto")
    go(run)
    assert [len(s.measured) for s in sessions] == [2, 1, 2, 1, 2]
    assert [s.cfg["tp"] for s in sessions] == [1, 2, 1, 2, 1], "engines take turns"
    a, b, skipped, c = (p.point_id for p in made.points)
    assert sorted(p.name for p in (run.path / "points").iterdir()) == sorted(
        [a, f"{a}-1", f"{a}-2", b, f"{b}-1", f"{b}-2", skipped, c, f"{c}-1"]
    )
    assert run.counts() == {"ok": 3, "skipped": 1}


def test_compile_caches_are_fresh_for_every_engine_unless_asked_to_be_kept(
    tmp_path: Path, sessions: list[FakeSession]
) -> None:
    for cache in ("cold", "warm"):
        axes: dict[str, list[Any]] = {"tp": [1, 2], "page_size": [16, 32], "engine__seed": [0, 1]}
        run = open_run(tmp_path, plan(sweep({"cache": cache}, **axes)), "auto")
        go(run)
        run.close()
        assert not (run.path / "cache").exists()
    assert [s.found for s in sessions[:8]] == [[]] * 8, "each found the one before it gone"
    warm = [s.found for s in sessions[8:]]
    assert warm == [[], ["code of 9"], [], ["code of 11"], [], ["code of 13"], [], ["code of 15"]]
    kept = [s.cache for s in sessions[8:]]
    assert len({p.engine_key for p in run.plan.points}) == 8
    # The engine's seed, which is not in the key, changes no code.
    of_code = [(p.cfg["tp"], p.cfg["page_size"]) for p in run.plan.points]
    assert {path.parent for path in kept if path} == {tmp_path / "warm"}
    assert len(set(kept)) == 4 == len(set(zip(kept, of_code, strict=True)))


def test_plain_lines_where_there_is_no_terminal(tmp_path: Path) -> None:
    out = io.StringIO()
    run = open_run(tmp_path, plan(sweep(batch=[1, 2], enforce_eager=[True, False])), "auto")
    go(run, Console(file=out, width=40))
    lines = out.getvalue().splitlines()
    first, last = (rf"\[{n}/4\] batch={n} enforce_eager=true: ok \d+\.\d s" for n in (1, 2))
    assert re.match(rf"{first}, about \d+ s left", lines[0])
    assert re.fullmatch(last, lines[1]), "a skipped point takes no time"
    assert lines[3] == (
        "[4/4] batch=2 enforce_eager=false: skipped (CUDA graphs need a CUDA device; none visible)"
    )


def test_the_marker_of_a_point_says_how_it_ended(tmp_path: Path) -> None:
    run = open_run(tmp_path, plan(sweep(enforce_eager=[False])), "auto")
    go(run)
    (point,) = run.plan.points
    marker = json.loads((run.path / "points" / point.point_id / "point.json").read_text())
    assert (marker["point_id"], marker["process"]) == (point.point_id, 0)
    assert (marker["status"], marker["reason"]) == ("skipped", point.skip)
    assert list(marker["files"]) == ["points.parquet"]
