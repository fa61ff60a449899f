"""The real engine through the command line on a trace: its tables, recomputed from their rows."""

from __future__ import annotations

import csv
import json
import random
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from harness.__main__ import main
from harness.store import Results, load

LAYERS, HIDDEN, VOCAB, ITEM = 4, 128, 1024, 4  # of the model tiny, in float32
ROWS, PROMPT_CAP, OUTPUT_CAP, RATE, SEED = 64, 12, 5, 500.0, 7


def trace(path: Path) -> list[tuple[int, int]]:
    """64 requests in the Azure format; -> (prompt, output) tokens under the caps."""
    rng, time = random.Random(3), datetime(2023, 11, 16, 18, 15, 46)
    lengths = [(rng.randint(1, 40), rng.randint(1, 20)) for _ in range(ROWS)]
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["TIMESTAMP", "ContextTokens", "GeneratedTokens"])
        for prompt, output in lengths:
            time += timedelta(milliseconds=rng.randint(1, 900))
            rows.writerow([f"{time.isoformat(timespec='microseconds')}0", prompt, output])
    return [(min(p, PROMPT_CAP), min(o, OUTPUT_CAP)) for p, o in lengths]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sweep")


def run(folder: Path, *settings: str) -> Results:
    runs = folder / "runs"
    seen = set(runs.glob("*"))
    status = main(
        ["device=cpu", "model=tiny", "workload=trace", f"workload.trace={folder / 'trace.csv'}",
         f"workload.prompt_cap={PROMPT_CAP}", f"workload.max_tokens_cap={OUTPUT_CAP}",
         f"workload.arrivals=poisson({RATE:g})", f"workload.seed={SEED}", f"results_dir={runs}",
         "engine.max_num_batched_tokens=8", "measure.min_repeats=1", "measure.max_repeats=1",
         "resume=never", *settings]
    )  # fmt: skip
    assert status == 0
    (made,) = set(runs.glob("*")) - seen
    return load(made)


@pytest.fixture(scope="module")
def lengths(folder: Path) -> list[tuple[int, int]]:
    return trace(folder / "trace.csv")


@pytest.fixture(scope="module")
def sweep(folder: Path, lengths: list[tuple[int, int]]) -> Results:
    """tp 1 and 2, four requests at once; eight tokens a step, so that prompts come in chunks."""
    return run(folder, "tp=1,2", "batch=4", f"workload.num_requests={ROWS}")


def of_tp(results: Results, table: str, tp: int) -> pd.DataFrame:
    points = results.points
    (point_id,) = points[points["tp"] == tp]["point_id"].unique()
    rows = getattr(results, table)
    return rows[rows["point_id"] == point_id].copy()


def figure(results: Results, tp: int, name: str, stat: str = "value", **where: object) -> float:
    rows = of_tp(results, "metrics", tp)
    rows = rows[(rows["name"] == name) & (rows["stat"] == stat)]
    for column, value in where.items():
        rows = rows[rows[column].isna() if value is None else rows[column] == value]
    (value,) = rows["value"]
    return float(value)


@pytest.mark.parametrize("tp", [1, 2])
def test_every_token_of_the_capped_trace_was_served(
    sweep: Results, lengths: list[tuple[int, int]], tp: int
) -> None:
    point = of_tp(sweep, "points", tp).iloc[0]
    assert point["status"] == "ok", point["reason"]
    assert point["prompt_tokens"] == sum(p for p, _ in lengths)
    assert point["output_tokens"] == sum(o for _, o in lengths)
    for _, served in of_tp(sweep, "requests", tp).groupby("pass"):
        rows = served.sort_values("request")
        assert list(zip(rows["prompt_tokens"], rows["output_tokens"], strict=True)) == lengths
    steps = of_tp(sweep, "steps", tp)
    plain = steps[(steps["pass"] == "plain") & (steps["rank"] == 0)]
    # The last token of a request is given out and never computed on.
    assert plain["tokens"].sum() == sum(p + o - 1 for p, o in lengths)
    assert plain["samples"].sum() == sum(o for _, o in lengths)
    assert plain["tokens"].max() <= 8 and plain["batch"].max() == 4
    assert (plain["samples"] == 0).any(), "no prompt came in chunks"


def test_every_step_has_the_collectives_of_the_model(sweep: Results) -> None:
    assert of_tp(sweep, "collectives", 1).empty
    rows, steps = of_tp(sweep, "collectives", 2), of_tp(sweep, "steps", 2)
    host = steps[steps["pass"] == "host"]
    samples = host.set_index(["rank", "step"])["samples"]
    counts = rows.groupby(["rank", "step", "kind"]).size().unstack(fill_value=0)
    assert sorted(counts.index) == sorted(samples.index)
    assert (counts["all_reduce"] == 2 * LAYERS + 1).all()
    assert (counts["gather"] == (samples > 0).reindex(counts.index).astype(int)).all()
    known = rows["expected_bytes"].notna()
    assert (rows[known]["bytes"] == rows[known]["expected_bytes"]).all()
    of_step = host[host["rank"] == 0].set_index("step")
    reduces, gathers = rows[rows["kind"] == "all_reduce"], rows[rows["kind"] == "gather"]
    tokens = reduces["step"].map(of_step["tokens"])
    assert (reduces["bytes"] == tokens * HIDDEN * ITEM).all()
    assert (gathers["bytes"] == gathers["step"].map(of_step["samples"]) * VOCAB * ITEM).all()
    assert figure(sweep, 2, "all_reduces_per_step", "max") == 2 * LAYERS + 1


@pytest.mark.parametrize("tp", [1, 2])
def test_throughput_is_tokens_over_the_window(sweep: Results, tp: int) -> None:
    point = of_tp(sweep, "points", tp).iloc[0]
    requests = of_tp(sweep, "requests", tp)
    plain = requests[requests["pass"] == "plain"]
    rate = plain["output_tokens"].sum() / point["wall_s"]
    assert figure(sweep, tp, "output_tok_s", repeat=0) == pytest.approx(rate, rel=1e-12)
    ends = plain["arrival"] + plain["e2e"]
    assert 0 < ends.max() <= point["wall_s"]


def test_transfer_wait_and_share_follow_from_the_rows(sweep: Results) -> None:
    rows, steps = of_tp(sweep, "collectives", 2), of_tp(sweep, "steps", 2)
    by_rank = rows.pivot(index=["step", "ordinal"], columns="rank", values="latency_us")
    shortest = rows.set_index(["step", "ordinal"]).index.map(by_rank.min(axis=1))
    reduces = (rows["kind"] == "all_reduce").to_numpy()
    np.testing.assert_allclose(rows["transfer_us"][reduces], shortest[reduces], rtol=1e-12)
    waited = rows["latency_us"] - shortest
    np.testing.assert_allclose(rows["wait_us"][reduces], waited[reduces], atol=1e-9)
    assert rows["transfer_us"][~reduces].isna().all()

    clean = steps[steps["pass"] == "plain"].groupby(["rank", "phase"])["device_us"].mean()
    timed = steps[steps["pass"] == "host"].groupby(["rank", "phase"]).size()
    spent = rows.groupby(["rank", "phase"])["latency_us"].sum()
    for rank in (0, 1):
        whole = spent[rank].sum() / (timed[rank] * clean[rank]).sum()
        share = figure(sweep, 2, "comm_share", ranks=str(rank), phase=None)
        assert share == pytest.approx(whole, rel=1e-9)
        decode = spent[rank, "decode"] / (timed[rank, "decode"] * clean[rank, "decode"])
        share = figure(sweep, 2, "comm_share", ranks=str(rank), phase="decode")
        assert share == pytest.approx(decode, rel=1e-9)


@pytest.mark.parametrize("tp", [1, 2])
def test_start_up_is_the_sum_of_its_phases_at_every_tp(sweep: Results, tp: int) -> None:
    phases = of_tp(sweep, "phases", tp)
    seconds = phases[phases["count"].isna()].set_index("phase")["seconds"].dropna()
    assert seconds.drop("total").sum() == pytest.approx(seconds["total"])
    assert seconds["spawn"] > 0  # interpreter and imports


def test_what_arrives_while_the_engine_is_full_waits(folder: Path, sweep: Results) -> None:
    """max_num_seqs=1: a request's first step comes after its predecessor's last token, and queue
    and TTFT count from its arrival."""
    results = run(folder, "tp=1", "batch=1", "workload.num_requests=16", "instrument=none")
    requested = json.loads(results.points["requested"][0])
    assert requested["engine"]["max_num_seqs"] == 1
    rows = results.requests.sort_values("request").reset_index(drop=True)
    gaps = np.random.default_rng([SEED, 0xA221]).exponential(1 / RATE, 16)
    arrived = rows["arrival"] - rows["arrival"][0]
    np.testing.assert_allclose(arrived, np.cumsum(gaps) - gaps[0], atol=1e-6)
    began = rows["arrival"] + rows["queue"]
    ended = (rows["arrival"] + rows["e2e"]).shift(1)
    busy = rows["arrival"] < ended
    assert busy.sum() > 4, "the requests came too slowly to meet"
    assert (rows["queue"][busy] > 0).all()
    assert (began[busy] >= ended[busy] - 1e-6).all()
    assert (rows["ttft"] > rows["queue"]).all()
    assert (rows["ttft"][busy] > (ended - rows["arrival"])[busy]).all()
