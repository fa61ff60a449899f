"""Collectives of a point: their rows and counts, and both held against the model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from harness.observers.records import CountRecord
from tests.support.fake_backend import FakeBackend, make_cfg
from tests.support.points import figure, measure


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


def test_a_latency_below_the_floor_is_kept_and_flagged(tmp_path: Path) -> None:
    backend = FakeBackend(make_cfg(), transfer_ns=-60)
    _, results, _ = measure(tmp_path, backend)
    rows = results.collectives
    assert rows["latency_us"].tolist() == pytest.approx([-0.06] * 70)
    assert rows["below_floor"].all() and rows["algbw_GBps"].isna().all()
    assert figure(results, "below_floor", "value") == 70


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
