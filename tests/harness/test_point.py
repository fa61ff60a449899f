"""Points measured on a backend whose times are known, so that every figure has one right value."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from engine.errors import EngineDeadError
from engine.steplog import STEP_DTYPE as ENGINE_STEPS
from harness import step_rows, telemetry, window
from harness.failures import classify
from harness.figure_rows import FigureRows
from harness.metrics import plain_figures
from harness.passes import stop
from harness.point import PointOutcome, measure_point, status_only_tables
from harness.records import CountRecord
from harness.store import Results, load, write_point
from harness.window import Window
from tests.support.fake_backend import FakeBackend, make_cfg, make_point

NOW = datetime.now(UTC)


def measure(
    tmp_path: Path, backend: FakeBackend | None = None, **changes: Any
) -> tuple[PointOutcome, Results, FakeBackend]:
    cfg = make_cfg(**changes)
    backend = backend or FakeBackend(cfg)
    point = make_point(cfg)
    outcome = measure_point(backend, point, tmp_path / "run7" / "points" / point.point_id)
    return outcome, load(tmp_path / "run7"), backend


def figure(results: Results, name: str, stat: str, **where: Any) -> Any:
    """The one value of that figure; over all repeats unless `repeat` is given."""
    rows = results.metrics
    rows = rows[(rows["name"] == name) & (rows["stat"] == stat)]
    where.setdefault("repeat", None)
    for column, value in where.items():
        rows = rows[rows[column].isna() if value is None else rows[column] == value]
    assert len(rows) == 1, rows
    value = rows.iloc[0]["value"]
    return None if pd.isna(value) else value


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


def test_known_delays_give_exact_figures(tmp_path: Path) -> None:
    """Two ranks; every collective 5 us, rank 0 waits 20 us more; clean steps of 1000 us."""
    cfg = make_cfg()
    backend = FakeBackend(cfg, transfer_ns=5_000, wait_ns=20_000)
    _, results, _ = measure(tmp_path, backend)
    decode = {"phase": "decode"}
    o_proj = {**decode, "kind": "all_reduce", "site": "attn.o_proj", "bytes": 2 * 8 * 4}
    assert figure(results, "transfer_us", "p50", **o_proj) == 5.0
    assert figure(results, "latency_us", "p50", **o_proj, ranks="min") == 5.0
    assert figure(results, "latency_us", "p99", **o_proj, ranks="max") == 25.0
    assert figure(results, "wait_us", "mean", **o_proj, ranks="max") == 20.0
    assert figure(results, "algbw_GBps", "p50", **o_proj) == pytest.approx(64 / 5e3)
    assert figure(results, "busbw_GBps", "p50", **o_proj) == pytest.approx(64 / 5e3)
    assert figure(results, "transfer_us_per_step", "p50", **decode) == 25.0
    assert figure(results, "wait_us_per_step", "p50", **decode, ranks="max") == 100.0
    assert figure(results, "wait_us_per_step", "p50", **decode, ranks="min") == 0.0
    assert figure(results, "all_reduces_per_step", "mean") == 5
    assert figure(results, "expected_all_reduces_per_step", "value") == 5
    assert figure(results, "gathers_per_step", "max") == 1
    assert figure(results, "token_ids_per_step", "max") == 1
    for ranks, comm, wait in (("0", 0.175, 0.1), ("1", 0.035, 0.0), ("max", 0.175, 0.1)):
        assert figure(results, "comm_share", "value", **decode, ranks=ranks) == pytest.approx(comm)
        assert figure(results, "wait_share", "value", **decode, ranks=ranks) == pytest.approx(wait)
    assert figure(results, "transfer_share", "value", **decode, ranks="0") == pytest.approx(0.025)
    assert figure(results, "floor_us", "value", ranks="0") == 0.1
    assert figure(results, "instrument_us", "value", **decode) == 0.0
    gather = {**decode, "kind": "gather", "site": "lm_head", "bytes": 2 * 64 * 4}
    assert figure(results, "transfer_us", "p50", **gather) is None
    rows = results.metrics
    reasons = rows[(rows["name"] == "transfer_us") & (rows["kind"] == "gather")]["reason"]
    assert set(reasons) == {"rooted"}


def test_instruments_cost_what_the_engine_log_grew_by(tmp_path: Path) -> None:
    """Steps of 1000 us in the plain pass and 1070 in the timed one by the engine's own log; the
    observer's own pair, 900 us, begins later and is no base. Seven collectives a step."""
    backend = FakeBackend(make_cfg())
    backend.instrumented_ns = 1_070_000

    def shorter(records: list[Any]) -> list[Any]:
        for record in records:
            record.steps["end_ns"] -= 100_000
        return records

    backend.records = shorter
    _, results, _ = measure(tmp_path, backend)
    for phase in ("prefill", "decode"):
        share = figure(results, "instrument_share", "value", phase=phase)
        assert share == pytest.approx(0.07)
        assert figure(results, "instrument_us", "value", phase=phase) == pytest.approx(10.0)
    assert figure(results, "step_us", "p50", phase="decode", ranks="max") == 1000.0


def counts(steps_done: int, reduces: int = 5) -> list[CountRecord]:
    """Of the five steps that ended last: what a model of two layers issues on two ranks."""
    step = {
        ("all_reduce", "embed"): [1, 64],
        ("all_reduce", "attn.o_proj"): [2, 128],
        ("all_reduce", "mlp.down_proj"): [reduces - 3, 128],
        ("gather", "lm_head"): [1, 512],
        ("broadcast", "token_ids"): [1, 16],
    }
    numbers = range(steps_done - 5, steps_done)
    return [CountRecord(rank, 2, {number: dict(step) for number in numbers}) for rank in (0, 1)]


def test_counts_alone_give_the_figures_of_counts(tmp_path: Path) -> None:
    backend = FakeBackend(make_cfg())
    backend.counted = counts
    outcome, results, _ = measure(tmp_path, backend, instrument=["counts"])
    assert outcome.status == "ok"
    for stat in ("min", "max"):
        assert figure(results, "all_reduces_per_step", stat) == 5
        assert figure(results, "gathers_per_step", stat) == 1
        assert figure(results, "token_ids_per_step", stat) == 1
    assert figure(results, "expected_all_reduces_per_step", "value") == 5
    assert figure(results, "latency_us", "p50") is None


def test_counts_alone_are_held_against_the_model(tmp_path: Path) -> None:
    backend = FakeBackend(make_cfg())
    backend.counted = lambda done: counts(done, reduces=6)
    outcome, _, _ = measure(tmp_path, backend, instrument=["counts"])
    assert outcome.status == "error" and outcome.engine_alive
    assert outcome.reason == (
        "AttributionError: step 15 (prefill), rank 0: "
        "1 all_reduce/embed, 2 all_reduce/attn.o_proj, 3 "
        "all_reduce/mlp.down_proj, 1 gather/lm_head and 1 of token ids counted; a model of 2 "
        "layers at tp=2 has 1 all_reduce/embed, 2 all_reduce/attn.o_proj, 2 "
        "all_reduce/mlp.down_proj, 1 gather/lm_head"
    )


def test_prompt_tokens_that_were_computed_twice_make_no_rate(tmp_path: Path) -> None:
    backend = FakeBackend(make_cfg())
    backend.grow = {"preemptions": 1}
    _, results, _ = measure(tmp_path, backend)
    rows = results.metrics[results.metrics["name"] == "prefill_tok_s"]
    assert rows["value"].isna().all()
    assert set(rows["reason"]) == {"preempted requests computed prompt tokens twice"}
    assert figure(results, "decode_tok_s", "mean") == pytest.approx(2 / 1002e-6)


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


def test_rates_and_latencies_of_the_plain_pass(tmp_path: Path) -> None:
    _, results, _ = measure(tmp_path)
    assert figure(results, "step_us", "p50", phase="decode", ranks="max") == 1000.0
    assert figure(results, "step_host_us", "p50", phase="decode") == 1002.0
    assert figure(results, "between_steps_us", "max") == 998.0
    # two sequences a decode step of 1002 us; eight prompt tokens in a prefill step of 1002 us
    assert figure(results, "decode_tok_s", "mean") == pytest.approx(2 / 1002e-6)
    assert figure(results, "prefill_tok_s", "mean") == pytest.approx(8 / 1002e-6)
    for repeat in (0, 1):
        wall = results.points["wall_s"][repeat]
        assert figure(results, "output_tok_s", "value", repeat=repeat) == pytest.approx(10 / wall)
        assert figure(results, "total_tok_s", "value", repeat=repeat) == pytest.approx(18 / wall)
    assert figure(results, "ttft", "p50") == 0.5 and figure(results, "queue", "p90") == 0.125
    assert figure(results, "tpot", "p50") == pytest.approx(0.25)
    assert figure(results, "itl", "p99") == pytest.approx(0.25)
    assert figure(results, "e2e", "max") == pytest.approx(1.5)
    assert figure(results, "tok_s_per_gpu", "mean") is None
    assert figure(results, "energy_j_per_token", "value", repeat=0) is None
    assert figure(results, "energy_j_per_token", "mean") is None
    assert figure(results, "mbu", "value", phase="decode") is None


def test_collective_rows_hold_what_was_measured(tmp_path: Path) -> None:
    _, results, _ = measure(tmp_path)
    rows = results.collectives
    # 5 steps of 5 all-reduces, a gather and a broadcast, on two ranks
    assert len(rows) == 5 * 7 * 2
    assert set(rows["pass"]) == {"host"} and set(rows["path"]) == {"gloo"}
    reduces = rows[rows["kind"] == "all_reduce"]
    assert reduces["bytes"].tolist() == reduces["expected_bytes"].tolist()
    assert set(reduces["transfer_us"]) == {5.0} and reduces["transfer_reason"].isna().all()
    rooted = rows[rows["kind"] != "all_reduce"]
    assert rooted["transfer_us"].isna().all() and rooted["wait_us"].isna().all()
    assert set(rooted["transfer_reason"]) == {"rooted"}
    assert rows["span_us"].isna().all() and rows["kernel_us"].isna().all()
    assert set(rows["source"]) == {"host"} and set(rows["floor_us"]) == {0.1}
    assert sorted(set(rows["layer"].dropna())) == [0, 1]
    ids = rows[rows["site"] == "token_ids"]
    assert set(ids["dtype"]) == {"int64"} and ids["expected_bytes"].isna().all()


def test_every_null_figure_has_a_reason_and_no_other_has_one(tmp_path: Path) -> None:
    for tp in (1, 2):
        _, results, _ = measure(tmp_path / str(tp), tp=tp)
        rows = results.metrics
        assert (rows["value"].isna() == rows["reason"].notna()).all()
        assert (rows["unit"].str.len() > 0).all()


def test_one_rank_has_a_share_of_zero_and_no_latencies(tmp_path: Path) -> None:
    outcome, results, _ = measure(tmp_path, tp=1)
    assert outcome.status == "ok"
    shares = results.metrics[results.metrics["name"] == "comm_share"]
    measured = shares[shares["value"].notna()]
    assert set(measured["value"]) == {0.0} and set(measured["n"]) == {0}
    assert figure(results, "latency_us", "p50") is None
    assert figure(results, "all_reduces_per_step", "mean") == 0
    assert figure(results, "transfer_us_per_step", "p50", phase="decode") is None
    assert len(results.collectives) == 0


def test_shuffled_records_change_nothing(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    cfg = make_cfg()
    plain, mixed = FakeBackend(cfg, wait_ns=9_000), FakeBackend(cfg, wait_ns=9_000)
    mixed.records = lambda records: [
        replace(r, collectives=rng.permutation(r.collectives), steps=rng.permutation(r.steps))
        for r in reversed(records)
    ]
    tables = []
    for name, backend in (("a", plain), ("b", mixed)):
        tables.append(measure(tmp_path / name, backend)[1].collectives)
    pd.testing.assert_frame_equal(*tables)


def test_ranks_that_disagree_make_an_error_without_figures(tmp_path: Path) -> None:
    backend = FakeBackend(make_cfg())
    backend.records = lambda records: [
        records[0],
        replace(records[1], collectives=np.delete(records[1].collectives, 9)),
    ]
    outcome, results, _ = measure(tmp_path, backend)
    assert outcome.status == "error" and outcome.engine_alive
    assert "step 1, ordinal 2: rank 1 lacks this row" in str(outcome.reason)
    assert set(results.points["status"]) == {"error"}
    assert "AttributionError" in results.points["traceback"][0]
    assert len(results.metrics) == 0 and len(results.collectives) == 0
    assert len(results.requests) == 6  # the evidence stays


def test_a_short_output_is_an_error_not_a_fast_point(tmp_path: Path) -> None:
    backend = FakeBackend(make_cfg())
    backend.short = 2
    outcome, results, _ = measure(tmp_path, backend)
    assert outcome.status == "error"
    assert "short_output: 1 of 2 requests gave fewer tokens than asked; request 0: 3 of 5" in str(
        outcome.reason
    )
    assert len(results.metrics) == 0
    rows = results.requests
    assert rows["output_tokens"].tolist() == [3, 5] and rows["asked_tokens"].tolist() == [5, 5]


def test_a_build_inside_the_window_contaminates(tmp_path: Path) -> None:
    backend = FakeBackend(make_cfg())
    backend.grow = {"compiles": 2, "preemptions": 1}
    outcome, results, _ = measure(tmp_path, backend)
    assert outcome.status == "contaminated"
    assert outcome.reason == (
        "built inside the measured window: plain pass: compiles +2; host pass: compiles +2"
    )
    assert set(results.points["status"]) == {"contaminated"}
    assert results.points["preemptions"].tolist() == [1, 1]
    assert json.loads(results.points["counters"][0])["compiles"] == 2


@pytest.mark.parametrize(("device", "noted"), [("cpu", True), ("cuda", False)])
def test_a_busy_machine_is_noted_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str, noted: bool
) -> None:
    def reading(when: str) -> list[dict[str, Any]]:
        values = {"cpu_busy_s": 100.0 if when == "after" else 0.0, "cpu_own_s": 0.0, "cores": 2.0}
        return [
            {"when": when, "device": "cpu", "name": name, "unit": "s", "value": value}
            for name, value in values.items()
        ]

    monkeypatch.setattr(window, "read_telemetry", reading)
    monkeypatch.setattr(telemetry, "BUSY_WALL_S", 0.0)
    backend = FakeBackend(make_cfg(instrument=[]))
    backend.effective["device"] = device
    _, results, _ = measure(tmp_path, backend, instrument=[], device=device, timing="host")
    notes = results.points["notes"].fillna("")
    assert set(notes.str.contains("busy machine: other processes used ")) == {noted}


def test_a_latency_below_the_floor_is_kept_and_flagged(tmp_path: Path) -> None:
    backend = FakeBackend(make_cfg(), transfer_ns=-60)
    _, results, _ = measure(tmp_path, backend)
    rows = results.collectives
    assert rows["latency_us"].tolist() == pytest.approx([-0.06] * 70)
    assert rows["below_floor"].all() and rows["algbw_GBps"].isna().all()
    assert figure(results, "below_floor", "value") == 70


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("enforce_eager", False, "enforce_eager: asked for True, the engine runs False"),
        ("page_size", 32, "page_size: asked for 16, the engine runs 32"),
        ("max_num_seqs", 8, "max_num_seqs: asked for 16, the engine runs 8"),
    ],
)
def test_another_configuration_than_asked_for_is_an_error(
    tmp_path: Path, name: str, value: Any, message: str
) -> None:
    backend = FakeBackend(make_cfg())
    backend.effective[name] = value
    outcome, results, _ = measure(tmp_path, backend)
    assert outcome.status == "error" and message in str(outcome.reason)
    assert backend.prompts == []
    assert results.points.iloc[0]["page_size"] == 16


def test_another_batch_than_asked_for_is_an_error(tmp_path: Path) -> None:
    cfg = make_cfg(batch=4)
    backend = FakeBackend(cfg)
    drain = backend.drain_steps

    def halved() -> list[np.ndarray]:
        logs = drain()
        for log in logs:
            log["batch"] //= 2
        return logs

    backend.drain_steps = halved  # type: ignore[method-assign]
    outcome, _, _ = measure(tmp_path, backend, batch=4)
    assert "batch: asked for 4, the engine decoded at most 2 sequences" in str(outcome.reason)


def test_a_failing_engine_becomes_a_row_and_is_not_used_again(tmp_path: Path) -> None:
    backend = FakeBackend(make_cfg())
    backend.fail = EngineDeadError(1, None, "Traceback ...\n  File x\nRuntimeError: boom")
    outcome, results, _ = measure(tmp_path, backend)
    assert outcome == PointOutcome("error", "rank 1: RuntimeError: boom", engine_alive=False)
    row = results.points.iloc[0]
    assert (row["status"], row["reason"], row["repeat"]) == ("error", outcome.reason, 0)
    assert "RuntimeError: boom" in row["traceback"]
    assert len(results.points) == 1


def test_without_instruments_there_is_no_instrumented_pass(tmp_path: Path) -> None:
    outcome, results, backend = measure(tmp_path, instrument=[])
    assert outcome.status == "ok" and len(backend.prompts) == 3
    assert set(results.steps["pass"]) == {"plain"}
    assert figure(results, "comm_share", "value") is None


def test_a_clock_that_this_version_lacks_is_refused(tmp_path: Path) -> None:
    outcome, _, _ = measure(tmp_path, timing="stamps")
    assert outcome.status == "error" and "set timing=host" in str(outcome.reason)


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


PLAN = {"min_repeats": 3, "max_repeats": 5, "rel_noise": 0.05, "wall_limit_s": 10.0}


@pytest.mark.parametrize(
    ("rates", "wall_s", "wanted"),
    [
        ([100.0, 100.0], 99.0, None),  # the minimum comes first
        ([100.0, 101.0, 99.0], 1.0, "noise"),
        ([100.0, 150.0, 50.0], 1.0, None),
        ([100.0, 150.0, 50.0], 10.0, "wall_limit"),
        ([100.0, 150.0, 50.0, 100.0, 10.0], 1.0, "max_repeats"),
    ],
)
def test_the_stopping_rule(rates: list[float], wall_s: float, wanted: str | None) -> None:
    assert stop(rates, wall_s, PLAN) == wanted


def dead(exitcode: int | None, text: str = "") -> EngineDeadError:
    return EngineDeadError(1, exitcode, text)


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (MemoryError(), "oom", "MemoryError"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), "oom", "RuntimeError: CUDA"),
        (dead(None, "Traceback\n  x\ntorch.OutOfMemoryError: no"), "oom", "rank 1: torch.OutOf"),
        (TimeoutError("no answer"), "timeout", "TimeoutError: no answer"),
        (dead(None, "T\n  x\nRuntimeError: Timed out waiting"), "timeout", "rank 1: RuntimeError"),
        (AssertionError("x < y"), "error", "AssertionError: x < y"),
        (dead(-9), "killed", "rank 1 was ended by signal 9 (SIGKILL); the kernel sends it"),
        (dead(-11), "killed", "rank 1 was ended by signal 11 (SIGSEGV)"),
        (
            dead(None, "T\n  raise ValueError  # not out of memory\nValueError: bad"),
            "error",
            "rank 1: ValueError: bad",
        ),
    ],
)
def test_what_an_exception_means(error: Exception, status: str, reason: str) -> None:
    failure = classify(error)
    assert failure.status == status and failure.reason.startswith(reason)
    assert failure.traceback
