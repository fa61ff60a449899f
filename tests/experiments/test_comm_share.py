"""Parts of a step that are known, and their sum."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from experiments.base import ExperimentError, report
from experiments.comm_share import EXPERIMENT, summary
from harness.store import load
from tests.support.made_tables import COLLECTIVE, STEP, Row, write

REDUCES = 5
TRANSFER, WAIT, GATHER, FLOOR = 8.0, 2.0, 6.0, 2.0
COMPUTE, BETWEEN, BESIDE = 100.0, 20.0, 30.0
STAMP, HANDOVER = 0.75, 0.5
"""What a stamp runs, and what passes until the kernel behind it: 20 us are 40 such gaps between
kernels that compute, of 53 kernels with two gaps at each of 6 collectives."""


def tables(
    mode: str = "graph", *, world: int = 2, step_us: float = 0.0, device: str = "cuda"
) -> dict[str, list[Row]]:
    """Three decode steps a pass. Rank 0 waits 2 us in each of 5 all-reduces by the timer and 40 by
    CUPTI; the root gathers in 6 us and the other sends in 3. Without `step_us` the clean step is
    what its parts are worth: 6 collectives whose pairs read 2 us round nothing, a stamp's own run
    among them, which a clean step does not have."""
    graph = mode.startswith("graph")
    own, clean = ("graph_timed" if graph else "backlog"), "step"
    if device == "cpu":
        own, clean = "host", "plain"
    steps: list[Row] = []
    rows: list[Row] = []
    for rank in range(world):
        wait = WAIT if rank == 0 else 0.0
        calls = REDUCES * (TRANSFER + wait) + (GATHER if rank == 0 else 3.0)
        calls += 6 * (FLOOR - STAMP)
        launched = REDUCES * (TRANSFER + (40.0 if rank == 0 else 0.0)) + calls
        launched -= 6 * (FLOOR - STAMP)
        launched -= REDUCES * (TRANSFER + wait)
        worth = COMPUTE + (BETWEEN + calls if graph else BETWEEN + BESIDE + launched)
        if world == 1:
            worth = COMPUTE + BETWEEN + BESIDE
        for number in range(3):
            place = {**STEP, "rank": rank, "step": number, "mode": mode}
            jitter = (number - 1) * 0.5  # means, not medians or minima
            steps.append({**place, "pass": clean, "device_us": (step_us or worth) + jitter})
            steps.append({**place, "pass": "other", "device_us": 1e6})
            timed = (step_us or worth) + 6 * 2 * (STAMP + HANDOVER) + 100.0 * (number == 2)
            steps.append({**place, "pass": "graph_timed", "device_us": timed})
            steps.append({**place, "pass": clean, "phase": "prefill", "device_us": 1e6})
            if device == "cuda":
                steps.append({**place, "pass": "profiler", "source": "cupti", "device_us": 400.0,
                              "compute_us": COMPUTE + jitter, "idle_us": BETWEEN + BESIDE,
                              "idle_comm_us": BESIDE, "kernels": 53})  # fmt: skip
            for ordinal in range(REDUCES + 1) if world > 1 else ():
                last = ordinal == REDUCES
                row = {**COLLECTIVE, "rank": rank, "step": number, "ordinal": ordinal, "mode": mode,
                       "world": world, "kind": "gather" if last else "all_reduce",
                       "site": "lm_head" if last else "attn.o_proj"}  # fmt: skip
                sent = GATHER if rank == 0 else 3.0
                rows.append({**row, "pass": own, "floor_us": FLOOR,
                             "latency_us": sent if last else TRANSFER + wait,
                             "transfer_us": None if last else TRANSFER,
                             "wait_us": None if last else wait})  # fmt: skip
                rows.append({**row, "pass": "span", "span_us": 1e6})
                if device == "cuda" and not last:
                    waits = 40.0 if rank == 0 else 0.0
                    rows.append({**row, "pass": "profiler", "source": "cupti",
                                 "kernel_us": 5.0 + waits, "transfer_us": 5.0,
                                 "wait_us": waits})  # fmt: skip
    return {"steps": steps, **({"collectives": rows} if rows else {})}


def rows_of(tmp_path: Path, made: dict[str, list[Row]], **changes: Any) -> list[dict[str, Any]]:
    write(tmp_path / "run", made, **changes)
    return summary(load(tmp_path / "run")).to_dict("records")  # type: ignore[no-any-return]


def test_parts_of_a_replay_add_up_on_each_rank(tmp_path: Path) -> None:
    first, second = rows_of(tmp_path, tables(), device="cuda")
    assert [first["rank"], second["rank"]] == [0, 1] and first["mode"] == "graph"
    expected = {"compute_us": 100.0, "gap_us": 20.0, "transfer_us": 40.0, "wait_us": 10.0,
                "gather_us": 6.0, "handover_us": 7.5}  # fmt: skip
    assert {name: first[name] for name in expected} == pytest.approx(expected)
    assert second["wait_us"] == 0.0 and second["gather_us"] == 3.0
    assert (first["step_us"], first["sum_us"], first["off"]) == pytest.approx((183.5, 183.5, 0))
    assert (second["step_us"], second["off"]) == pytest.approx((170.5, 0))
    assert first["comm_share"] == pytest.approx(56 / 183.5), "the hand-over is no communication"
    assert first["launch_gap_us"] == 50.0 and first["profiled_us"] == 400.0


def test_launched_steps_wait_as_cupti_says_and_all_their_gaps_count(tmp_path: Path) -> None:
    first, _ = rows_of(tmp_path, tables("eager"), device="cuda", enforce_eager=True)
    assert (first["wait_us"], first["gap_us"], first["handover_us"]) == (200.0, 50.0, 0.0)
    assert (first["step_us"], first["off"]) == pytest.approx((100 + 50 + 40 + 200 + 6, 0))


def test_one_rank_computes_and_has_gaps(tmp_path: Path) -> None:
    (row,) = rows_of(tmp_path, tables(world=1), device="cuda", tp=1)
    assert (row["comm_share"], row["sum_us"], row["off"]) == (0.0, 150.0, 0.0)


@pytest.mark.parametrize(("step_us", "holds"), [(183.5, True), (177.5, False)])
def test_the_claim_is_about_every_sum(tmp_path: Path, step_us: float, holds: bool) -> None:
    made = tables(step_us=step_us)
    made["steps"] = [s for s in made["steps"] if s["rank"] == 0 or s["pass"] != "step"]
    made["collectives"] = [c for c in made["collectives"] if c["rank"] == 0]
    made["steps"] = [s for s in made["steps"] if s["rank"] == 0]
    write(tmp_path / "run", made, device="cuda")
    found = EXPERIMENT.verdict(summary(load(tmp_path / "run")))
    assert found.holds is holds
    if not holds:
        assert "the parts' sum is +3.4% from the step's own time, 0 of 1 within 3%" in found.text
        assert (
            "ran graph, whose steps last up to +125.4% under CUPTI: their sum is -54.1%"
            in found.text
        )


def test_a_cpu_has_shares_and_no_sum(tmp_path: Path) -> None:
    first, _ = rows_of(tmp_path, tables("eager", device="cpu", step_us=200.0), device="cpu")
    assert first["reason"] == "a CPU has no kernels to time" and pd.isna(first["sum_us"])
    assert (first["transfer_us"], first["wait_us"]) == (40.0, 10.0)
    assert first["comm_share"] == pytest.approx(56 / 200)
    text = report(EXPERIMENT, tmp_path / "run", tmp_path / "out")
    assert "**The claim is undecided**" in text and "no step has all its parts: a CPU has" in text
    assert (tmp_path / "out" / "comm_share.png").read_bytes()[:4] == b"\x89PNG"


def test_collectives_that_nobody_timed_are_no_zero(tmp_path: Path) -> None:
    """Two ranks, instrument none: their shares were 0.0 %, as of one rank."""
    made = tables("eager", device="cpu", step_us=200.0)
    write(tmp_path / "run", {"steps": made["steps"]}, tp=2, device="cpu", mode="eager")
    frame = summary(load(tmp_path / "run"))
    names = ["transfer_us", "wait_us", "gather_us", "comm_share"]
    assert frame["step_us"].notna().all() and frame[names].isna().all(axis=None)
    assert EXPERIMENT.verdict(frame).text.startswith("no collective was timed; no step has all its")
    write(tmp_path / "solo", {"steps": made["steps"]}, tp=1, device="cpu", mode="eager")
    assert (summary(load(tmp_path / "solo"))[names] == 0.0).all(axis=None)


def test_what_a_run_lacks_is_no_part_and_no_sum(tmp_path: Path) -> None:
    """A replayed point without the time of its step had all gaps and no hand-over, as if launched;
    one of which the profiler alone saw collectives was a TypeError."""
    run, made = tmp_path / "run", tables()
    lacks = {
        1: {"steps": [s for s in made["steps"] if s["pass"] == "profiler"]},
        4: {},
        8: {name: [r for r in rows if r["pass"] != "graph_timed"] for name, rows in made.items()},
        16: {"steps": [{**s, "kernels": None} for s in made["steps"]]},
    }
    for index, (batch, less) in enumerate(lacks.items()):
        write(run, {**made, **less}, index=index, batch=batch, device="cuda")
    rows = summary(load(run)).query("rank == 0").set_index("batch")
    assert rows["sum_us"].notna().to_dict() == {1: False, 4: True, 8: False, 16: False}
    assert rows.loc[1, ["step_us", "gap_us", "handover_us"]].isna().all()
    assert rows.loc[1, "transfer_us"] == 40.0
    instruments = "not measured (instrument collectives, profiler)"
    assert rows["reason"].drop(4).to_dict() == {
        1: f"step_us, gap_us, handover_us {instruments}",
        8: f"transfer_us, wait_us, gather_us, handover_us {instruments}",
        16: "handover_us: the run lacks the number of kernels or the time of a timed step",
    }


def test_a_step_that_lacks_a_transfer_is_left_out_of_the_mean(tmp_path: Path) -> None:
    made = tables("eager", device="cpu", step_us=200.0)
    whole = rows_of(tmp_path / "whole", made, device="cpu")[0]["transfer_us"]
    last = max(c["step"] for c in made["collectives"])
    other = [
        {**c, "step": last + 1}
        for c in made["collectives"]
        if (c["rank"], c["step"], c["pass"]) == (0, last, "host")
    ]
    lacking = next(c for c in other if c["kind"] == "all_reduce")
    lacking["transfer_us"] = None
    made["collectives"] += other
    found = rows_of(tmp_path / "lacking", made, device="cpu")[0]["transfer_us"]
    assert found == whole == 40.0


def test_one_ranks_share_of_none_is_no_part_of_the_range(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write(run, tables(), device="cuda")
    frame = summary(load(run))
    alone = frame.iloc[:1].assign(tp=1, comm_share=0.0)
    both = EXPERIMENT.verdict(pd.concat([frame, alone], ignore_index=True)).text
    assert both.startswith("communication is ") and "0.0%" not in both.split(";")[0]
    over = EXPERIMENT.verdict(frame.assign(comm_share=[0.5, 1.2])).text
    assert over.startswith("communication is 50.0% to 120.0% of a step (1 above all of it: coll")
    assert EXPERIMENT.verdict(alone).text.startswith("one rank has no communication")


def test_points_that_cannot_answer_say_why(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write(run, {}, status="oom", reason="no memory")
    with pytest.raises(ExperimentError, match="no point has the time of a decode step"):
        summary(load(run))
    made = tables()
    made["steps"] = [s for s in made["steps"] if s["pass"] != "profiler"]
    write(run, made, index=1, batch=4, device="cuda")
    reasons = summary(load(run)).groupby("batch")["reason"].first().to_dict()
    assert reasons == {
        2: "oom: no memory",
        4: "compute_us, gap_us, handover_us not measured (instrument collectives, profiler)",
    }
