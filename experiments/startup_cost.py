"""What compiling and capturing cost before the first token, and when it is earned back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

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
from experiments.intervals import product
from experiments.noise_floor import values
from experiments.repeated import Group, groups, problem
from harness.store import Results
from harness.tables.engine_costs import cache_state

if TYPE_CHECKING:
    import pandas as pd

AXES = ("compile", "enforce_eager")
BASE = ("off", True)
PHASES = ("spawn", "load", "compile", "capture", "warmup")
NO_CACHE = "-"
NO_START = "its start-up was not recorded"
SLOWER = "it saves no time per token"
Rates = list[tuple[float, ...]]
"""Output tok/s of each engine's repeats."""
COLUMNS = {
    "compile": Column("off, layer or model"),
    "enforce_eager": Column("no CUDA graphs"),
    "compiled_code": Column(
        "what the compile cache held: cold (nothing), warm (all), part; - where nothing is compiled"
    ),
    "engines": Column("fresh engines that found it so; times are their medians"),
    "start_s": Column("process start to ready", ".2f"),
    "spawn_s": Column("of it processes, imports, connections: what no other phase claims", ".2f"),
    "load_s": Column("weights", ".2f"),
    "compile_s": Column("tracing and compiling, or reading the cache", ".2f"),
    "capture_s": Column("CUDA graphs", ".2f"),
    "warmup_s": Column("first steps; those of compiled code are in compile_s", ".2f"),
    "buckets": Column("graphs: batch sizes, and rows of steps with prompts, that have one"),
    "graphs_GB": Column("device memory that capturing them took", ".2f"),
    "output_tok_s": Column("median over engines, once it is ready", ".4g"),
    "gain": Column("output_tok_s against eager, not compiled", ".3f"),
    "gain_lo": Column("95 % interval of it, Welch over engines", ".3f"),
    "gain_hi": Column("upper end", ".3f"),
    "extra_s": Column("start_s above that of eager, not compiled", ".2f"),
    "break_even_tokens": Column(
        "extra_s / time saved per output token against eager, not compiled; below 0 where it "
        "starts no later; none where the gain's interval reaches 1 or there is none",
        ",.0f",
    ),
    "reason": Column("why there is no break-even"),
}


def summary(results: Results) -> pd.DataFrame:
    """A row a point and state of the compile cache, with COLUMNS after the settings that vary.

    Raises:
        ExperimentError: no engine's start-up is known.
    """
    found, starts = groups(results, AXES), startups(results)
    rows = [row for group in found for row in _rows(group, starts)]
    if not any(row["start_s"] is not None for row in rows):
        why = "; ".join(dict.fromkeys(str(row["reason"]) for row in rows))
        raise ExperimentError(
            f"no engine's start-up is known ({why}); run python -m harness +experiment=startup_cost"
        )
    return framed(rows, found[0].shown, COLUMNS)


def startups(results: Results) -> pd.DataFrame:
    """A row a point and fresh engine: point_id, process, compiled_code, start_s and the PHASES in
    seconds (null where a phase did not happen), buckets, graphs_GB."""
    import pandas as pd

    key = ["point_id", "process"]
    rows = results.table("phases", [*key, "phase", "bucket", "seconds", "bytes", "count"])
    whole = rows[rows["bucket"].isna()]
    seconds = whole.pivot_table(
        index=key, columns="phase", values="seconds", aggfunc="max", dropna=False
    )
    counts = whole.pivot_table(index=key, columns="phase", values="count", aggfunc="max")
    captured = rows[rows["bucket"].notna()].groupby(key)
    found = pd.DataFrame(index=seconds.index)
    for phase in ("total", *PHASES):
        name = "start_s" if phase == "total" else f"{phase}_s"
        found[name] = seconds.get(phase, np.nan)
    cache = counts.reindex(index=found.index, columns=["cache_hits", "cache_misses"]).fillna(0)
    found["compiled_code"] = [
        cache_state(hits, misses) or NO_CACHE for hits, misses in cache.to_numpy(float)
    ]
    found["buckets"] = captured.size().reindex(found.index).fillna(0).astype(int)
    found["graphs_GB"] = captured["bytes"].sum().astype(float).reindex(found.index) / 1e9
    return found.reset_index()


def _rows(group: Group, starts: pd.DataFrame) -> list[dict[str, Any]]:
    base = group.points.get(BASE)
    why = problem(base)
    standard = None
    if base is not None and why is None:
        own = starts[starts["point_id"] == base["point_id"].iloc[0]]
        if own.empty:
            why = NO_START
        else:
            standard = float(own["start_s"].median()), values(base, "output_tok_s")
    rows = []
    for (how, eager), point in group.points.items():
        head = group.head() | dict.fromkeys(COLUMNS)
        head |= {"compile": how, "enforce_eager": eager}
        if (wrong := problem(point)) is not None:
            rows.append(head | {"reason": wrong})
            continue
        own = starts[starts["point_id"] == point["point_id"].iloc[0]]
        if own.empty:
            rows.append(head | {"reason": NO_START})
        for state, engines in own.groupby("compiled_code", sort=False):
            row = head | {"compiled_code": state, "engines": len(engines)} | _times(engines)
            rates = values(point, "output_tok_s")
            row["output_tok_s"] = _rate(rates)
            if (how, eager) != BASE:
                row |= _break_even(row, rates, standard, why)
            rows.append(row)
    return rows


def _times(engines: pd.DataFrame) -> dict[str, Any]:
    names = ("start_s", *(f"{phase}_s" for phase in PHASES), "graphs_GB")
    medians = {name: engines[name].astype(float).median() for name in names}
    return medians | {"buckets": int(engines["buckets"].max())}


def _rate(engines: Rates) -> float:
    return float(np.median([np.median(engine) for engine in engines]))


def _break_even(
    row: dict[str, Any], rates: Rates, standard: tuple[float, Rates] | None, why: str | None
) -> dict[str, Any]:
    """Extra start-up / time saved per token, against `standard`: (start-up s, output tok/s)."""
    if standard is None:
        return {"reason": f"eager, not compiled: {why}"}
    start_s, base = standard
    gain = product([(1, rates), (-1, base)])
    found: dict[str, Any] = {"gain": gain.value, "extra_s": row["start_s"] - start_s}
    if not gain.known:
        return found | {"reason": "one engine: no interval of its gain (measure.n_process=5)"}
    found |= {"gain_lo": gain.lo, "gain_hi": gain.hi}
    if gain.hi < 1:
        return found | {"reason": SLOWER}
    if gain.lo <= 1:
        return found | {"reason": "its gain's interval reaches 1"}
    saved = 1 / _rate(base) - 1 / row["output_tok_s"]
    return found | {"break_even_tokens": found["extra_s"] / saved}


def verdict(frame: pd.DataFrame) -> Finding:
    """Every mode that starts later than eager must save time per token, by its gain's interval."""
    rows = frame[frame["extra_s"].notna()]
    later = rows[rows["extra_s"] > 0]
    if later.empty:
        return Finding(None, "no mode starts later than eager, not compiled")
    earned = later[later["break_even_tokens"].notna()]
    text = (
        f"compiling and graphs start {between(later['extra_s'], '.1f')} s later than eager; "
        f"{len(earned)} of {len(later)} rows earn it back"
    )
    if len(earned):
        text += f", after {between(earned['break_even_tokens'], ',.0f')} output tokens"
    lost, left = int((later["reason"] == SLOWER).sum()), len(later) - len(earned)
    if left > lost:
        text += f"; of {left - lost} no interval tells whether they do"
    return Finding(False if lost else None if left else True, text)


def figure(results: Results, frame: pd.DataFrame, path: Path) -> None:
    """A stacked bar a row, with its break-even."""
    drawn = frame[frame["start_s"].notna()]
    drawing, (ax,) = lines(labels(drawn, COLUMNS, ("compile", "enforce_eager", "compiled_code")))
    left, places = np.zeros(len(drawn)), range(len(drawn))
    for phase in PHASES:
        widths = drawn[f"{phase}_s"].fillna(0.0).to_numpy()
        ax.barh(places, widths, left=left, label=phase)
        left = left + widths
    for place, (end, tokens) in enumerate(zip(left, drawn["break_even_tokens"], strict=True)):
        if tokens > 0:
            ax.text(end, place, f" {tokens:,.0f} tokens", va="center", fontsize=7)
    ax.margins(x=0.2)  # room for the tokens behind the longest bar
    ax.set_xlabel("s from process start to ready; then the tokens that earn it")
    ax.legend(fontsize=7, ncols=len(PHASES), loc="lower center", bbox_to_anchor=(0.5, 1.0))
    drawing.savefig(path, dpi=120)


EXPERIMENT = Experiment(
    name="startup_cost",
    question="What do compiling and capturing cost before the first token, and when is it earned "
    "back?",
    claim="each mode that starts later than eager saves time per token, so that it is earned back",
    source="against vllm-project/vllm#19824: start-up makes users choose --enforce-eager",
    columns=COLUMNS,
    summary=summary,
    figure=figure,
    verdict=verdict,
    elsewhere=(
        Elsewhere("start-up 14.18 s, and 39.34 s with -O3", "vllm-project/vllm#11005"),
        Elsewhere(
            "some 15 s of Dynamo, 70 s of compiling and 60 s of graphs",
            "vllm-project/vllm#19824, 70B, TP=8",
        ),
        Elsewhere(
            "compiling 17 s, and 4 s where layers share one region", "pytorch/torchtitan#3145"
        ),
        Elsewhere(
            "start-up 21.7 to 25.0 s for 4.07 to 5.83 requests/s",
            "vllm-project/vllm#25444, Qwen3-0.6B",
        ),
    ),
)
