"""Other engines on the same workload by the same clock, each in its fastest mode."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.base import Column, Elsewhere, Experiment, ExperimentError, Finding, framed
from experiments.repeated import Group, error_bars, gain, groups, judged, problem
from harness.judging.verdict import Verdict
from harness.settings.config import CHOICES
from harness.store import Results
from harness.tables.engine_costs import of_points
from harness.tables.figures import FIGURES

if TYPE_CHECKING:
    import pandas as pd

AXES = ("backend", "enforce_eager", "compile")
PEERS = CHOICES["backend"][1:]
JUDGED = ("output_tok_s", "tpot", "ttft", "prefill_tok_s")
COSTS = {"start_total_s": "s", "memory_peak_bytes": "B", "memory_device_used_bytes": "B"}
"""Of an engine, without repeats in it: beside each other, not judged."""
DECIDES = "tpot"
"""The metric of the claim; throughput holds the prefill besides."""
_OF_PEER = {
    "": Column("its centre over fresh engines", ".4g"),
    "_ratio": Column("how many times better than native", ".3f"),
    "_lo": Column("95 % interval of the ratio, Welch over engines", ".3f"),
    "_hi": Column("upper end", ".3f"),
    "_verdict": Column("of it against native, see docs/verdicts.md"),
}
COLUMNS = {
    "metric": Column("the figure"),
    "unit": Column("of it"),
    "native": Column("this engine's centre over fresh engines", ".4g"),
    **{f"{peer}{end}": column for peer in PEERS for end, column in _OF_PEER.items()},
    "modes": Column("of each engine the mode with the most output tok/s, which its figures are of"),
    "reason": Column("why an engine has no verdict; in a cell's first row, why it has no figure"),
}


def summary(results: Results) -> pd.DataFrame:
    """A row a cell and metric, with COLUMNS after the settings that vary.

    Raises:
        ExperimentError: in no cell is native beside another engine.
    """
    found, costs = groups(results, AXES), of_points(results)
    rows = [row for group in found for row in _rows(group, costs)]
    if not any(row[f"{peer}_verdict"] is not None for row in rows for peer in PEERS):
        why = "; ".join(dict.fromkeys(row["reason"] for row in rows if row["reason"] is not None))
        why = why or "no engine has figures"
        raise ExperimentError(
            f"no cell has native and another engine ({why}); run "
            "python -m harness +experiment=peers"
        )
    return framed(rows, found[0].shown, COLUMNS)


def fastest(group: Group, backend: str) -> tuple[str, pd.DataFrame | None, str | None]:
    """(mode, repeats, None) of the engine's mode with the highest median of output_tok_s, or
    ("", None, why it has none)."""
    ours = {key: rows for key, rows in group.points.items() if key[0] == backend}
    whole = {key: rows for key, rows in ours.items() if problem(rows) is None}
    if not whole:
        reasons = dict.fromkeys(str(problem(rows)) for rows in ours.values())
        return "", None, "; ".join(reasons) or "not in the run"
    key = max(whole, key=lambda one: whole[one]["output_tok_s"].median())
    compiled = "" if key[2] == "off" else f"+compile={key[2]}"
    return ("eager" if key[1] else "graph") + compiled, whole[key], None


def _rows(group: Group, costs: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    nothing: dict[str, Any] = group.head() | dict.fromkeys(COLUMNS)
    chosen = {backend: fastest(group, backend) for backend in CHOICES["backend"]}
    nothing["modes"] = ", ".join(f"{b}: {mode}" for b, (mode, _, _) in chosen.items() if mode)
    missing = [f"{b}: {why}" for b, (_, _, why) in chosen.items() if why]
    native = chosen["native"][1]
    if native is None:
        return [nothing | {"reason": "; ".join(missing)}]
    rows = []
    said = missing  # of the cell, once, in its first row
    for metric in JUDGED:
        row = nothing | {"metric": metric, "unit": FIGURES[metric].unit}
        alone = judged(native, native, metric).a
        row["native"] = alone.value if alone else None
        for peer in PEERS:
            theirs = chosen[peer][1]
            if theirs is None or (native[metric].isna().all() and theirs[metric].isna().all()):
                continue
            one = judged(native, theirs, metric)
            row[peer] = one.b.value if one.b else None
            names = (f"{peer}_ratio", f"{peer}_lo", f"{peer}_hi")
            row |= dict(zip(names, gain(one, metric).values(), strict=True))
            row[f"{peer}_verdict"] = str(one.verdict)
            said += [f"{peer}: {one.reason}"] if one.verdict == Verdict.AMBIGUOUS else []
        rows.append(row | {"reason": "; ".join(said) or None})
        said = []
    for name, unit in COSTS.items():
        of = {
            backend: costs.get(str(points["point_id"].iloc[0]), {}).get(name)
            for backend, (_, points, _) in chosen.items()
            if points is not None
        }
        rows.append(nothing | {"metric": name, "unit": unit, **of})
    return rows


def verdict(frame: pd.DataFrame) -> Finding:
    """No engine decodes FASTER than native: of every cell and engine."""
    rows = frame[frame["metric"] == DECIDES]
    found = {
        peer: rows[rows[f"{peer}_verdict"].notna()][f"{peer}_verdict"].tolist() for peer in PEERS
    }
    found = {peer: words for peer, words in found.items() if words}
    said = []
    for peer, words in found.items():
        ratios = rows[f"{peer}_ratio"].dropna()
        span = f" ({ratios.min():.2f} to {ratios.max():.2f} times native)" if len(ratios) else ""
        ahead = words.count(str(Verdict.FASTER))
        said.append(f"{peer} is FASTER in {ahead} of {len(words)} cells{span}")
    every = [word for words in found.values() for word in words]
    text = f"{DECIDES}: " + "; ".join(said)
    if str(Verdict.FASTER) in every:
        return Finding(False, text)
    known = bool(every) and set(every) <= {str(Verdict.SLOWER), str(Verdict.SAME)}
    return Finding(True if known else None, text)


def figure(results: Results, frame: pd.DataFrame, path: Path) -> None:
    """The ratio of DECIDES of each cell, a marker an engine, with its interval."""
    from matplotlib.figure import Figure

    rows = frame[frame["metric"] == DECIDES].reset_index(drop=True)
    axes = list(frame.columns[: list(frame.columns).index("metric")])
    axes = [name for name in axes if rows[name].nunique() > 1] or ["batch"]
    drawing = Figure(figsize=(7, 4.5), layout="constrained")
    ax = drawing.subplots()
    for place, peer in enumerate(PEERS):
        own = rows[rows[f"{peer}_ratio"].notna()]
        if own.empty:
            continue
        ratio = own[f"{peer}_ratio"]
        bars = error_bars(ratio, own[f"{peer}_lo"], own[f"{peer}_hi"])
        ax.errorbar(own.index + 0.1 * place, ratio, yerr=bars, fmt="o", capsize=3, label=peer)
    ax.axhline(1, color="0.5", linewidth=0.8)
    ax.set_yscale("log")
    names = [" ".join(f"{name}={row[name]}" for name in axes) for _, row in rows.iterrows()]
    ax.set_xticks(range(len(rows)), names, rotation=30, ha="right", fontsize=8)
    ax.set_ylabel(f"times as fast as native ({DECIDES})")
    ax.legend(fontsize=8)
    drawing.savefig(path, dpi=120)


EXPERIMENT = Experiment(
    name="peers",
    question="How fast are other engines on the same workload, by the same clock?",
    claim="no other engine decodes faster than this one in any cell",
    source="this repository's own aim",
    columns=COLUMNS,
    summary=summary,
    figure=figure,
    verdict=verdict,
    elsewhere=(
        Elsewhere(
            "1,434.13 output tok/s of nano-vLLM beside 1,361.84 of vLLM (1.053 times)",
            "nano-vLLM's README, Qwen3-0.6B, RTX 4070 Laptop, workload nano_vllm",
        ),
        Elsewhere(
            "10,009 output tok/s of a nano-vLLM fork beside 8,588 of vLLM 0.10.2 (1.165 times)",
            "cosmoliu2002/nano-vllm-triton#1, A800, workload nano_vllm",
        ),
    ),
)
