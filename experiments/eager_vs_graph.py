"""What CUDA graphs gain over launching every kernel from Python, by batch and model."""

from __future__ import annotations

import json
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
)
from experiments.repeated import ONE_TOKEN, Group, error_bars, gain, groups, judged, problem
from harness.judging.cells import DEFAULT
from harness.judging.verdict import Verdict
from harness.store import Results
from harness.tables.engine_costs import of_points
from harness.tables.figures import FIGURES

if TYPE_CHECKING:
    import pandas as pd

JUDGED = (*DEFAULT, "step_host_us")
DECIDES = "tpot"
"""The metric of the claim: what a user of the decode phase waits for."""
COLUMNS = {
    "metric": Column("the figure"),
    "eager": Column("its centre over fresh engines, every kernel launched from Python", ".4g"),
    "graph": Column("the same, steps replayed (with prompts: smaller ones)", ".4g"),
    "unit": Column("of both"),
    "gain": Column("how many times better with graphs", ".3f"),
    "gain_lo": Column("95 % interval of the gain, Welch over engines", ".3f"),
    "gain_hi": Column("upper end", ".3f"),
    "verdict": Column("of graph against eager, see docs/verdicts.md"),
    "graphs_GB": Column("device memory of the captured graphs, of the fullest rank", ".2f"),
    "reason": Column("of the verdict, A eager and B graph; or why there is none"),
}


def summary(results: Results) -> pd.DataFrame:
    """A row a pair of points and metric, with COLUMNS after the settings that vary.

    Raises:
        ExperimentError: no pair has a gain of DECIDES.
    """
    found, costs = groups(results, ("enforce_eager",)), of_points(results)
    rows = [row for group in found for row in _rows(group, costs)]
    if not any(row["metric"] == DECIDES and row["gain"] is not None for row in rows):
        reasons = dict.fromkeys(str(row["reason"]) for row in rows if row["gain"] is None)
        why = "; ".join(reasons) or ONE_TOKEN
        raise ExperimentError(
            f"no point was measured with and without graphs ({why}); on a GPU run "
            "python -m harness +experiment=eager_vs_graph"
        )
    return framed(rows, found[0].shown, COLUMNS)


def _rows(group: Group, costs: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    nothing = group.head() | dict.fromkeys(COLUMNS)
    eager, graph = group.points.get((True,)), group.points.get((False,))
    wrong = [f"{n}: {w}" for n, p in (("eager", eager), ("graph", graph)) if (w := problem(p))]
    if wrong:
        return [nothing | {"reason": "; ".join(wrong)}]
    assert eager is not None and graph is not None
    pool = costs.get(str(graph["point_id"].iloc[0]), {}).get("memory_graph_pool_bytes")
    rows = []
    for metric in JUDGED:
        if eager[metric].isna().all() and graph[metric].isna().all():
            continue
        one = judged(eager, graph, metric)
        rows.append(
            nothing
            | {
                "metric": metric,
                "eager": one.a.value if one.a else None,
                "graph": one.b.value if one.b else None,
                "unit": FIGURES[metric].unit,
                **gain(one, metric),
                "verdict": str(one.verdict),
                "graphs_GB": None if pool is None else pool / 1e9,
                "reason": one.reason,
            }
        )
    return rows


def series(frame: pd.DataFrame) -> list[pd.DataFrame]:
    """Rows of DECIDES that differ in batch alone, by batch."""
    rows = frame[(frame["metric"] == DECIDES) & frame["gain"].notna()]
    axes = [name for name in rows.columns[: list(rows.columns).index("metric")] if name != "batch"]
    keys = rows[axes].apply(lambda row: json.dumps(row.tolist(), default=str), axis=1)
    return [own.sort_values("batch") for _, own in rows.groupby(keys, sort=False)]


def verdict(frame: pd.DataFrame) -> Finding:
    """Each series of batches: FASTER at its smallest, and a smaller gain at its largest."""
    found = [_falls(own) for own in series(frame) if len(own) > 1]
    rows = frame[(frame["metric"] == DECIDES) & frame["gain"].notna()]
    text = (
        f"graphs make {DECIDES} {between(rows['gain'], '.2f')} times better; "
        f"{sum(f is True for f in found)} of {len(found)} series gain most at their smallest batch"
    )
    slower = rows[rows["verdict"] == str(Verdict.SLOWER)]
    if len(slower):
        text += f"; {len(slower)} cells are SLOWER"
    if not found:
        return Finding(None, f"{text}; one batch alone")
    if None in found:
        text += f"; of {found.count(None)} no interval tells"
    return Finding(False if False in found else True if all(found) else None, text)


def _falls(own: pd.DataFrame) -> bool | None:
    small, large = own.iloc[0], own.iloc[-1]
    if small["verdict"] in (str(Verdict.SLOWER), str(Verdict.SAME)):
        return False
    if small["gain_hi"] < large["gain_lo"]:
        return False
    faster = small["verdict"] == str(Verdict.FASTER)
    return True if faster and small["gain_lo"] > large["gain_hi"] else None


def figure(results: Results, frame: pd.DataFrame, path: Path) -> None:
    """Gain against batch, a line a series, with its intervals."""
    import pandas as pd
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(7, 4.5), layout="constrained")
    ax = drawing.subplots()
    every = series(frame)
    firsts = pd.concat([own.iloc[:1] for own in every]).drop(columns="batch")
    for own, label in zip(every, labels(firsts, COLUMNS), strict=True):
        bars = error_bars(own["gain"], own["gain_lo"], own["gain_hi"])
        ax.errorbar(own["batch"], own["gain"], yerr=bars, marker="o", capsize=3, label=label)
    ax.axhline(1, color="0.5", linewidth=0.8)
    ax.set_xscale("log", base=2)
    batches = sorted({batch for own in every for batch in own["batch"]})
    ax.set_xticks(batches, map(str, batches))
    ax.set_xlabel("batch")
    ax.set_ylabel(f"times better with graphs ({DECIDES})")
    ax.legend(fontsize=8)
    drawing.savefig(path, dpi=120)


EXPERIMENT = Experiment(
    name="eager_vs_graph",
    question="What do CUDA graphs gain over launching from Python, at which batch and model?",
    claim="graphs make decoding faster at the smallest batch, and gain less at the largest",
    source="vllm-project/vllm#1440: only at lower batch sizes",
    columns=COLUMNS,
    summary=summary,
    figure=figure,
    verdict=verdict,
    elsewhere=(
        Elsewhere(
            "TPOT 4.20 to 2.72 ms at concurrency 1 (1.544 times better), 9.85 to 9.11 ms at 30 "
            "(1.081)",
            "xllm#713, Qwen3-0.6B",
        ),
        Elsewhere("34.70 to 12.90 ms a token (2.69 times better)", "pie#348, Qwen3-8B-FP8"),
        Elsewhere(
            "4.07 to 5.83 requests/s (1.43 times better), start-up 21.7 to 25.0 s",
            "vllm-project/vllm#25444, Qwen3-0.6B, full graphs against the default before",
        ),
    ),
)
