"""Rows that a measured point leaves in every table, and one that never ran."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pandas as pd

from engine.execution.steplog import STEP_DTYPE as ENGINE_STEPS
from harness.measuring.window import Window
from harness.rows import steps as step_rows
from harness.rows.figures import FigureRows
from harness.rows.metrics import plain_figures
from harness.store import load
from harness.sweep.point import PointOutcome, measure_point, status_only_tables
from harness.tables.point_files import write_point
from tests.support.fake_backend import FakeBackend, make_cfg, make_point
from tests.support.points import figure, measure

NOW = datetime.now(UTC)


def test_a_measured_point_has_every_table(tmp_path: Path) -> None:
    outcome, results, backend = measure(tmp_path)
    assert outcome == PointOutcome("ok", None, True)
    points = results.points
    assert points["repeat"].tolist() == [0, 1]
    assert set(points["status"]) == {"ok"} and set(points["run_id"]) == {"run7"}
    first = points.iloc[0]
    assert (first["tp"], first["batch"], first["compile"], first["model"]) == (2, 2, "off", "tiny")
    assert (first["comm"], first["effective.comm"]) == ("auto", "gloo")
    assert (first["requests"], first["prompt_tokens"], first["output_tokens"]) == (2, 8, 10)
    assert (first["effective.batch"], first["effective.mode"]) == (2, "eager")
    assert first["stop_reason"] in ("noise", "max_repeats")
    assert json.loads(first["requested"])["workload"]["output_tokens"] == 5
    assert json.loads(first["effective"])["num_pages"] == 64
    # 2 plain repeats and one with instruments; 1 prefill and 4 decode steps each, on two ranks
    steps = results.steps
    assert steps.groupby(["pass", "rank"]).size().to_dict() == {
        ("host", 0): 5, ("host", 1): 5, ("plain", 0): 10, ("plain", 1): 10
    }  # fmt: skip
    assert set(steps["device_us"]) == {1000.0}
    assert steps.loc[steps["rank"] == 0, "host_us"].tolist() == [1002.0] * 15
    assert steps.loc[steps["rank"] == 1, "host_us"].isna().all()
    assert results.requests.groupby("pass").size().to_dict() == {"host": 2, "plain": 4}
    assert backend.resets == 1 and backend.points_served == 1
    # warm-up, two repeats, instrumented: never the same prompt twice
    assert len({tuple(p) for call in backend.prompts for p in call}) == 8


def test_every_null_figure_has_a_reason_and_no_other_has_one(tmp_path: Path) -> None:
    for tp in (1, 2):
        _, results, _ = measure(tmp_path / str(tp), tp=tp)
        rows = results.metrics
        assert (rows["value"].isna() == rows["reason"].notna()).all()
        assert (rows["unit"].str.len() > 0).all()


def test_requests_without_a_token_say_what_they_lack(tmp_path: Path) -> None:
    window = Window("plain", 0, [], (), [np.zeros(0, ENGINE_STEPS)], 0.0, 1.0, NOW, {})
    rows = FigureRows({"run_id": "r", "point_id": "p", "process": 0})
    plain_figures(rows, [window], tp=1, device="cpu", clean=None)
    reasons = {r["name"]: r["reason"] for r in rows.rows if r["stat"] == "p50"}
    assert reasons["ttft"] == reasons["e2e"] == "no request has a token"
    assert reasons["queue"] == "no request was in a step"
    assert reasons["tpot"] == reasons["itl"] == "no request has a second token"


def test_a_step_that_was_no_replay_ran_as_the_engine_runs_otherwise() -> None:
    log = np.zeros(3, ENGINE_STEPS)
    log["phase"], log["replayed"] = [0, 1, 1], [False, True, False]  # one beyond the buckets
    window = Window("plain", 0, [], (), [log], 0.0, 1.0, NOW, {})
    for mode, launched in (("graph", "eager"), ("graph+compiled-model", "compiled-model")):
        assert step_rows.steps({}, [window], mode)["mode"].tolist() == [launched, mode, launched]


def test_without_instruments_there_is_no_instrumented_pass(tmp_path: Path) -> None:
    outcome, results, backend = measure(tmp_path, instrument=[])
    assert outcome.status == "ok" and len(backend.prompts) == 3
    assert set(results.steps["pass"]) == {"plain"}
    assert figure(results, "comm_share", "value") is None


def test_the_first_point_of_an_engine_pays_for_its_start(tmp_path: Path) -> None:
    cfg = make_cfg()
    backend = FakeBackend(cfg)
    for index in (0, 1):
        point = make_point(cfg, point_id=f"{index:012x}", index=index)
        measure_point(backend, point, tmp_path / "run" / "points" / point.point_id, process=index)
    phases = load(tmp_path / "run").phases
    assert phases.groupby("process")["shared"].agg(set).to_dict() == {0: {False}, 1: {True}}
    seconds = phases[phases["process"] == 0].set_index("phase")["seconds"]
    assert (seconds["spawn"], seconds["load"], seconds["total"]) == (0.5, 0.25, 0.75)
    unknown = phases[phases["phase"] == "compile"]
    assert unknown["seconds"].isna().all() and unknown["reason"].notna().all()
    assert set(phases[phases["phase"] == "compiles"]["count"]) == {3}


def test_a_point_that_never_ran_has_one_row(tmp_path: Path) -> None:
    point = make_point(make_cfg(tp=4))
    tables = status_only_tables(
        point, "skipped", "needs 4 GPUs, 2 visible", run_id="r", environment={"host": "h"}
    )
    write_point(tmp_path / "points" / "x", tables)
    row = load(tmp_path).points.iloc[0]
    assert (row["status"], row["reason"], row["tp"], row["host"], row["repeat"]) == (
        "skipped", "needs 4 GPUs, 2 visible", 4, "h", 0
    )  # fmt: skip
    assert pd.isna(row["wall_s"]) and pd.isna(row["output_tokens"]) and pd.isna(row["effective.tp"])
