"""Levers whose gains are known, one at a time and all together, and what the experiment says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import torch

from experiments.base import ExperimentError, report
from experiments.levers import EXPERIMENT, LEVERS, TAKEN, cells, summary
from harness.__main__ import conf_folder
from harness.settings.config import register
from harness.settings.launcher import compose
from harness.store import load
from harness.tables import export
from harness.tables import report as of_points
from tests.support.made_runs import noisy, write_cell

BASE: dict[str, Any] = {
    "device": "cuda", "timing": "stamps", "attention": "flash2_triton", "comm": "symm_fused",
    "engine__overlap": True, "engine__fused": "store", "engine__linear": "triton",
    "engine__graph_prompt_tokens": None,
}  # fmt: skip
PULLED: dict[str, dict[str, Any]] = {
    "base": {},
    "no_overlap": {"engine__overlap": False},
    "no_prompt_graphs": {"engine__graph_prompt_tokens": 0},
    "flash2": {"attention": "flash2"},
    "triton": {"attention": "triton"},
    "nccl": {"comm": "nccl"},
    "symm_mem": {"comm": "symm_mem"},
    "unfused": {"engine__fused": "none"},
    "layers": {"engine__fused": "layers"},
    "cublas": {"engine__linear": "torch"},
}


def write_levers(run: Path, speeds: dict[str, float], first: int = 0, **changes: Any) -> None:
    """Engines of 100 tok/s at the base and `speed` times as many with a lever pulled; 0.4 % of
    noise between engines, 1 % within."""
    for place, (name, speed) in enumerate(speeds.items(), first):
        rates = noisy(5, 6, between=0.004, within=0.01, seed=place)
        write_cell(run, [[r * speed for r in engine] for engine in rates], index=place,
                   **{**BASE, **PULLED[name], **changes})  # fmt: skip


SPEEDS = {"base": 1.0, "no_overlap": 0.8, "no_prompt_graphs": 0.25, "flash2": 0.8,
          "triton": 1.1, "nccl": 1.0, "unfused": 0.5, "layers": 0.9, "cublas": 0.625}  # fmt: skip
GAINS = [("engine.overlap", "false", "true", 1.25),
         ("engine.graph_prompt_tokens", "0", "null", 4.0),
         ("attention", "flash2", "flash2_triton", 1.25),
         ("attention", "triton", "flash2_triton", 1 / 1.1),
         ("attention", "flash2", "triton", 1.375),
         ("comm", "nccl", "symm_fused", 1.0), ("engine.fused", "none", "store", 2.0),
         ("engine.fused", "layers", "store", 1 / 0.9), ("engine.fused", "none", "layers", 1.8),
         ("engine.linear", "torch", "triton", 1.6)]  # fmt: skip


def test_each_lever_is_set_against_what_differs_in_it_alone(tmp_path: Path) -> None:
    write_levers(tmp_path / "run", SPEEDS)
    frame = summary(load(tmp_path / "run"))
    tpot = frame[frame["metric"] == "tpot"]
    found = {
        tuple(row[:3]): row[3] for row in tpot[["lever", "before", "after", "gain"]].to_numpy()
    }
    assert found == pytest.approx({g[:3]: g[3] for g in GAINS}, rel=0.015)
    rates = frame[frame["metric"] == "output_tok_s"]
    assert rates["gain"].to_numpy() == pytest.approx(tpot["gain"].to_numpy(), rel=0.01)
    assert list(tpot["verdict"]) == [
        "SLOWER" if gain < 0.99 else "FASTER" if gain > 1.01 else "SAME" for *_, gain in GAINS
    ]
    values = rates.set_index("lever").loc["engine.overlap", ["value_before", "value_after"]]
    assert values.to_list() == pytest.approx([80, 100], rel=0.01)


def test_the_interval_is_welchs_of_logarithms(tmp_path: Path) -> None:
    write_levers(tmp_path / "run", {"base": 1.0, "no_overlap": 0.8})
    frame = summary(load(tmp_path / "run"))
    row = frame[frame["metric"] == "output_tok_s"].iloc[0]
    medians = [
        np.log(np.median(np.array(noisy(5, 6, between=0.004, within=0.01, seed=s)) * x, axis=1))
        for s, x in ((0, 1.0), (1, 0.8))
    ]
    welch = scipy.stats.ttest_ind(*medians, equal_var=False).confidence_interval(0.95)
    expected = np.exp([welch.low, welch.high])
    assert row[["gain_lo", "gain_hi"]].to_list() == pytest.approx(expected, rel=1e-6)


def test_of_all_combinations_only_neighbours_are_pairs(tmp_path: Path) -> None:
    """Overlap and fused sums, each with and without the other."""
    run = tmp_path / "run"
    write_levers(run, {"base": 1.2, "nccl": 1.0})
    write_levers(run, {"base": 0.88, "nccl": 0.8}, first=2, engine__overlap=False)
    frame = summary(load(run))
    tpot = frame[frame["metric"] == "tpot"]
    found = {(r["lever"], r["beside"]): r["gain"] for _, r in tpot.iterrows()}
    assert found == pytest.approx(
        {
            ("engine.overlap", "comm=nccl"): 1.25,
            ("engine.overlap", "comm=symm_fused"): 1.2 / 0.88,
            ("comm", "engine.overlap=true"): 1.2,
            ("comm", "engine.overlap=false"): 1.1,
        },
        rel=0.015,
    )


@pytest.mark.parametrize(
    ("speeds", "holds", "said"),
    [
        (
            {"layers": 1.1},
            False,
            "1 cells are faster with another value; engine.fused layers to st",
        ),
        ({"unfused": 0.5, "nccl": 1.0}, True, "engine.fused none to store: 1.99 t"),
        ({"no_overlap": 1.3}, False, "FASTER in 0 and SLOWER in 1 of 1 cells"),
        ({"triton": 1.012}, None, "attention triton to flash2_triton: 0.9"),
    ],
)
def test_the_claim_is_that_nothing_beats_what_is_taken(
    tmp_path: Path, speeds: dict[str, float], holds: bool | None, said: str
) -> None:
    write_levers(tmp_path / "run", {"base": 1.0, **speeds})
    found = EXPERIMENT.verdict(summary(load(tmp_path / "run")))
    assert found.holds is holds, found.text
    assert said in found.text


def test_null_is_a_value_of_a_lever_and_reads_so(tmp_path: Path) -> None:
    """Where no other lever is pulled, a column of null and 0 would be one of NaN and 0.0."""
    run = tmp_path / "run"
    write_levers(run, {"base": 1.0, "no_prompt_graphs": 0.25})
    frame = summary(load(run))
    assert frame[["before", "after"]].drop_duplicates().to_numpy().tolist() == [["0", "null"]]
    found = EXPERIMENT.verdict(frame)
    assert found.holds is True
    assert found.text.startswith("engine.graph_prompt_tokens 0 to null: ")
    assert "times better, FASTER in 1 and SLOWER in 0 of 1 cells" in found.text
    text = report(EXPERIMENT, run, tmp_path / "out")
    assert "| engine.graph_prompt_tokens | 0 | null |" in text
    write_levers(run, {"base": 1.0}, first=2, engine__overlap=False)
    write_levers(run, {"no_prompt_graphs": 0.5}, first=3, engine__overlap=False)
    tpot = (frame := summary(load(run)))[frame["metric"] == "tpot"]
    told = tpot[tpot["lever"] == "engine.overlap"].set_index("beside")["gain"]
    assert told.to_dict() == pytest.approx(
        {"engine.graph_prompt_tokens=null": 1.0, "engine.graph_prompt_tokens=0": 0.5}, rel=0.015
    )


def test_where_prompts_without_graphs_are_faster_the_claim_does_not_hold(tmp_path: Path) -> None:
    write_levers(tmp_path / "run", {"base": 1.0, "no_prompt_graphs": 1.1})
    assert EXPERIMENT.verdict(summary(load(tmp_path / "run"))).holds is False


def test_a_run_from_before_a_setting_is_no_side_of_its_lever(tmp_path: Path) -> None:
    """It launched its prompts, which null does not."""
    run = tmp_path / "run"
    write_levers(run, {"no_prompt_graphs": 1.0, "no_overlap": 1.0})
    before = {name: value for name, value in BASE.items() if "prompt" not in name}
    write_cell(run, noisy(5, 6, between=0.004, within=0.01, seed=7), index=2, **before)
    with pytest.raises(ExperimentError, match="it has no such pair"):
        summary(load(run))


def test_a_sweep_of_null_and_integers_prints_them(tmp_path: Path) -> None:
    """In the table of points, in that of engines, and in what is exported."""
    run, name = tmp_path / "run", "engine.graph_prompt_tokens"
    for place, most in enumerate((None, 0, 512)):
        write_levers(run, {"base": 1.0}, first=place, engine__graph_prompt_tokens=most)
    write_levers(run, {"base": 1.0}, first=3, page_size=None)
    frame = of_points.summary(load(run)).assign(start_total_s=1.0)
    for headings, rows, *_ in (of_points.view(frame), of_points.engines(frame)):
        places = [headings.index(n) for n in (name, "page_size")]
        assert [[row[place] for place in places] for row in rows] == [
            ["null", "16"], ["0", "16"], ["512", "16"], ["null", "null"],
        ]  # fmt: skip
    assert [row[name] for row in export.rows(run)] == [None, 0, 512, None]
    lines = [line.split(",") for line in export.csv(run).splitlines()]
    assert [line[lines[0].index(name)] for line in lines[1:]] == ["", "0", "512", ""]


def test_what_the_engine_takes_is_what_it_resolves_to() -> None:
    from engine.config import EngineConfig
    from engine.resolve import ATTENTION, COMM, FUSED, LINEAR

    tables = {"attention": ATTENTION, "comm": COMM, "engine.fused": FUSED,
              "engine.linear": LINEAR}  # fmt: skip
    first = {name: table["cuda"][0] for name, table in tables.items()}
    told = EngineConfig(model="")
    untold = {n: getattr(told, n[7:]) for n in ("engine.overlap", "engine.graph_prompt_tokens")}
    assert untold == {"engine.overlap": None, "engine.graph_prompt_tokens": None}
    # overlap=None is true on a GPU.
    assert first | untold | {"engine.overlap": True} == TAKEN
    for name, table in tables.items():
        assert set(table["cuda"]) == set(LEVERS[name])


def test_a_pair_that_is_not_whole_says_why(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_levers(run, {"base": 1.0})
    with pytest.raises(ExperimentError, match="differ in one lever were measured .it has no such"):
        summary(load(run))
    write_cell(run, [], index=1, status="error", reason="no P2P", **{**BASE, **PULLED["nccl"]})
    with pytest.raises(ExperimentError, match=r"measured \(nccl: error: no P2P\); run"):
        summary(load(run))
    write_levers(run, {"layers": 1 / 1.1}, first=2)
    frame = summary(load(run))
    assert frame[frame["lever"] == "comm"]["reason"].to_list() == ["nccl: error: no P2P"]
    text = report(EXPERIMENT, run, tmp_path / "out")
    assert "engine.fused layers to store: 1.10 times better, FASTER in 1" in text
    assert (tmp_path / "out" / "levers.png").read_bytes()[:4] == b"\x89PNG"


def test_where_no_token_follows_the_first_its_time_decides() -> None:
    """A pair of workload=prefill, whose requests have no TPOT, beside one that has both."""
    rows = [
        {"lever": lever, "before": 1, "after": 2, "metric": metric, "gain": gain}
        for lever, metric, gain in (
            ("attention", "ttft", 3.0), ("attention", "tpot", None),
            ("comm", "ttft", 4.0), ("comm", "tpot", 5.0),
            ("engine.fused", "step_us", 6.0),
        )
    ]  # fmt: skip
    found = cells(pd.DataFrame(rows))
    assert found[["lever", "gain"]].to_numpy().tolist() == [["attention", 3.0], ["comm", 5.0]]


def test_the_sweep_of_two_gpus_pulls_one_lever_a_point(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one rank nothing is reduced: its points are the base's and measured once."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    register()
    points = compose(["+experiment=levers", "model=qwen3-0.6b", "batch=1"], conf_folder())
    pulled: dict[int, list[dict[str, Any]]] = {1: [], 2: []}
    for cfg in points:
        values = {n: cfg["engine"][n[7:]] if n.startswith("engine.") else cfg[n] for n in LEVERS}
        assert cfg["enforce_eager"] is False
        pulled[cfg["tp"]].append({n: v for n, v in values.items() if v != TAKEN[n]})
    first = [{}, {"engine.overlap": False}, {"engine.graph_prompt_tokens": 0},
             {"attention": "flash2"}, {"attention": "triton"}]  # fmt: skip
    last = [{"engine.fused": "none"}, {"engine.fused": "layers"}, {"engine.linear": "torch"}]
    assert pulled[1] == [*first, {}, {}, *last]
    assert pulled[2] == [*first, {"comm": "nccl"}, {"comm": "symm_mem"}, *last]
