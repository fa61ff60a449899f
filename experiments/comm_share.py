"""What of a decode step is communication: parts, each measured by itself, and their sum."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.base import (
    Column,
    Elsewhere,
    Experiment,
    ExperimentError,
    Finding,
    between,
    framed,
    labels,
    lines,
)
from experiments.points import Point, named, points, shown
from experiments.step_parts import PARTS, step_parts, why_not
from harness.store import Results

if TYPE_CHECKING:
    import pandas as pd

TOLERANCE = 0.03
"""By which the parts' sum may differ from the step's own time."""
COMMUNICATION = ("transfer_us", "wait_us", "gather_us")
COLUMNS = {
    "mode": Column("how the forward ran"),
    "process": Column("which fresh engine"),
    "rank": Column("of whose step these are the parts; nothing is taken over ranks"),
    "step_us": Column("the clean step by stamps at its ends (CPU: host's clock), mean", ".1f"),
    "compute_us": Column("kernels that do not communicate, sum by CUPTI", ".1f"),
    "gap_us": Column(
        "no kernel runs, by CUPTI; in replays what lies between kernels that compute, since stamps "
        "round a collective hold the gaps beside it",
        ".1f",
    ),
    "transfer_us": Column("all-reduces, minimum over ranks, by stamps", ".1f"),
    "wait_us": Column(
        "all-reduces, waiting for the last rank: stamps in replays, CUPTI in launched steps", ".1f"
    ),
    "gather_us": Column("logits to the root and ids from it, waiting included, by stamps", ".1f"),
    "handover_us": Column(
        "floor of a pair of stamps, taken off each latency, times the collectives of a replay: "
        "what passing from kernel to kernel costs at both ends of one",
        ".1f",
    ),
    "sum_us": Column("of the six parts; none of them is a remainder", ".1f"),
    "off": Column("sum_us / step_us - 1", ".1%"),
    "comm_share": Column("(transfer + wait + gather) / step_us", ".1%"),
    "launch_gap_us": Column("all time in which no kernel runs, by CUPTI", ".1f"),
    "profiled_us": Column("first to last kernel of a step that CUPTI watches", ".1f"),
    "off_profiled": Column("sum_us / profiled_us - 1: compute and gaps are of that step", ".1%"),
    "reason": Column("why there is no sum"),
}


def summary(results: Results) -> pd.DataFrame:
    """A row a point, engine and rank, with COLUMNS after the settings that vary.

    Raises:
        ExperimentError: no point has the time of a step.
    """
    found = points(results)
    names, parts = shown(found), step_parts(results)
    rows = [row for point in found for row in _rows(point, parts, names)]
    if not any(row.get("step_us") for row in rows):
        raise ExperimentError(
            "no point has the time of a decode step; measure one by "
            "python -m harness +experiment=comm_share"
        )
    return framed(rows, names, COLUMNS)


def _rows(point: Point, parts: pd.DataFrame, names: tuple[str, ...]) -> list[dict[str, Any]]:
    own = parts[parts["point_id"] == point.point_id]
    head = named(point.asked, names) | dict.fromkeys(COLUMNS) | {"mode": point.mode}
    if own.empty or point.failure is not None:
        return [head | {"reason": point.failure or "no decode step was timed"}]
    return [head | _row(point, row) for row in own.to_dict("records")]


def _row(point: Point, row: dict[str, Any]) -> dict[str, Any]:
    found = {name: row.get(name) for name in COLUMNS if name in row}
    found["comm_share"] = sum(row[name] for name in COMMUNICATION) / row["step_us"]
    found["reason"] = why_not(point, row)
    if found["reason"] is None:
        found["sum_us"] = sum(row[name] for name in PARTS)
        found["off"] = found["sum_us"] / row["step_us"] - 1
        found["off_profiled"] = found["sum_us"] / row["profiled_us"] - 1
    return found


def verdict(frame: pd.DataFrame) -> Finding:
    """The claim holds where every sum is within TOLERANCE of its step."""
    summed = frame[frame["off"].notna()]
    shares = frame[frame["tp"] > 1]["comm_share"]
    text = f"communication is {between(shares, '.1%')} of a step"
    if frame[frame["tp"] > 1]["transfer_us"].isna().all():
        text = "no collective was timed" if len(shares) else "one rank has no communication"
    if over := int((frame["comm_share"] > 1).sum()):
        text += f" ({over} above all of it: collectives are timed in another pass than the step)"
    if summed.empty:
        why = "; ".join(dict.fromkeys(frame["reason"].dropna()))
        return Finding(None, f"{text}; no step has all its parts: {why}")
    far = summed[summed["off"].abs() > TOLERANCE]
    text += (
        f"; the parts' sum is {between(summed['off'], '+.1%')} from the step's own time, "
        f"{len(summed) - len(far)} of {len(summed)} within {TOLERANCE:.0%}"
    )
    if len(far):
        slower = (far["profiled_us"] / far["step_us"] - 1).max()
        modes = ", ".join(sorted(set(far["mode"].dropna())))
        text += (
            f"; the others ran {modes}, whose steps last up to {slower:+.1%} under CUPTI: their "
            f"sum is {between(far['off_profiled'], '+.1%')} from the steps that CUPTI watched"
        )
    return Finding(len(far) == 0, text)


def figure(results: Results, frame: pd.DataFrame, path: Path) -> None:
    """A stacked bar a row, and a line where the step's own time is."""
    drawn = frame[frame["step_us"].notna()]
    drawing, (ax,) = lines(labels(drawn, COLUMNS, ("process", "rank")))
    left, places = [0.0] * len(drawn), range(len(drawn))
    for name in PARTS:
        widths = (drawn[name].fillna(0.0) / drawn["step_us"] * 100).to_list()
        ax.barh(places, widths, left=left, label=name)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    ax.axvline(100, color="black", linewidth=0.8)
    ax.set_xlabel("% of the clean step")
    ax.legend(fontsize=7, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    drawing.savefig(path, dpi=120)


EXPERIMENT = Experiment(
    name="comm_share",
    question="What of a decode step is computing, communication, waiting, and no kernel at all?",
    claim="parts that are measured each by itself add up to the step's own time within 3 %",
    source="vllm-project/vllm#52777 asks for the classes; that no part may be a remainder is ours",
    columns=COLUMNS,
    summary=summary,
    figure=figure,
    verdict=verdict,
    elsewhere=(
        Elsewhere(
            "communication is 38 % of inference latency at TP=8",
            "Ladder-Residual, arXiv 2501.06589, 70B, as en.papernotes.org quotes it",
        ),
        Elsewhere(
            "up to 20 % of a step over NVLink",
            "TokenWeave, arXiv 2505.11329, 8 H100, large batches",
        ),
        Elsewhere(
            "all-reduces alone let Qwen3-8B at TP=4 make 379 tok/s eager and 713 in graphs",
            "waynehacking8/nccl-collectives-bench, 4 of 8 H100 shared with others, NCCL 2.18.3",
        ),
    ),
)
