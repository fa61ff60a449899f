"""Figures of points on a backend whose times are known, so that each has one right value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_backend import FakeBackend, make_cfg
from tests.support.points import figure, measure


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


def test_prompt_tokens_that_were_computed_twice_make_no_rate(tmp_path: Path) -> None:
    backend = FakeBackend(make_cfg())
    backend.grow = {"preemptions": 1}
    _, results, _ = measure(tmp_path, backend)
    rows = results.metrics[results.metrics["name"] == "prefill_tok_s"]
    assert rows["value"].isna().all()
    assert set(rows["reason"]) == {"preempted requests computed prompt tokens twice"}
    assert figure(results, "decode_tok_s", "mean") == pytest.approx(2 / 1002e-6)


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
