"""Whether TP size, batch and mode change greedy tokens, and only where two are as good."""

from __future__ import annotations

import json
from dataclasses import dataclass
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
from experiments.greedy import Answers, kept, of_engine, of_transformers, prompts
from experiments.points import Point, named, points, shown
from harness.machine.fingerprint import digest
from harness.machine.models import random_weights
from harness.store import Results

if TYPE_CHECKING:
    import pandas as pd

REFERENCE = "transformers"
TIES = 2.0
"""Times the largest difference of log-probabilities: both of the two best may have moved by it."""
COLUMNS = {
    "mode": Column("how the forward ran"),
    "against": Column("transformers in float32, or the run's engine of least TP, batch and mode"),
    "requests": Column("prompts, of Python's sources that a trained model has not seen"),
    "identical": Column("tokens before the first that differs, of all tokens", ".2%"),
    "diverged": Column("requests with a token that differs"),
    "first": Column("earliest place of one, from 0", ".0f"),
    "dlogprob": Column(
        "largest difference of a chosen token's log-probability, over the tokens before the first "
        "that differs",
        ".2e",
    ),
    "tie": Column(
        "where tokens first differ, by how much the best stands above the second best for "
        "`against`, at most",
        ".2e",
    ),
    "reason": Column("why there is no figure"),
}


@dataclass(frozen=True, slots=True)
class Difference:
    """Answers against others of the same prompts; `places` [requests] of the first token that
    differs, the number of tokens where none does."""

    places: list[int]
    tokens: int
    dlogprob: float | None
    tie: float | None

    def row(self) -> dict[str, Any]:
        diverged = [place for place in self.places if place < self.tokens]
        return {
            "requests": len(self.places),
            "identical": sum(self.places) / (self.tokens * len(self.places)),
            "diverged": len(diverged),
            "first": min(diverged, default=None),
            "dlogprob": self.dlogprob,
            "tie": self.tie,
        }


def difference(found: Answers, base: Answers) -> Difference:
    """After the first token that differs the contexts do too, and nothing is compared."""
    places, moved, ties = [], [], []
    for one, other in zip(found, base, strict=True):
        pairs = zip(one.tokens, other.tokens, strict=True)
        place = next((i for i, (a, b) in enumerate(pairs) if a != b), len(other.tokens))
        places.append(place)
        logprobs = zip(one.logprobs[:place], other.logprobs[:place], strict=True)
        moved += [abs(a - b) for a, b in logprobs]
        ties += other.lead[place : place + 1]
    tokens = len(base[0].tokens)
    return Difference(places, tokens, max(moved, default=None), max(ties, default=None))


def summary(results: Results) -> pd.DataFrame:
    """A row a point and what it is held against, with COLUMNS after the settings that vary. What is
    not in the run's folder `numerics` is generated now, by an engine of each point.

    Raises:
        ExperimentError: random weights, or no point that ran.
    """
    found = points(results)
    usable = [point for point in found if point.failure is None]
    if not usable:
        raise ExperimentError(
            "no point that ran; measure some by python -m harness +experiment=tp_numerics"
        )
    asked = _requested(results)
    if any(random_weights(asked[point.point_id]["model"]) for point in usable):
        raise ExperimentError(
            "random weights (dummy ones, or model=tiny as it is built here) have flat "
            "distributions; give trained ones, for instance "
            "model.path=$(python scripts/train_tiny.py)"
        )
    names = shown(found)
    rows = []
    for point in found:
        head = named(point.asked, names) | dict.fromkeys(COLUMNS) | {"mode": point.mode}
        if point.failure is not None:
            rows.append(head | {"reason": point.failure})
            continue
        answers = _answers(results, asked[point.point_id])
        reference = _reference(results, asked[point.point_id])
        rows.append(head | {"against": REFERENCE} | difference(answers, reference).row())
        base = _base(point, usable)
        if base is not point:
            own = difference(answers, _answers(results, asked[base.point_id]))
            rows.append(head | {"against": _name(base)} | own.row())
    return framed(rows, names, COLUMNS)


def _requested(results: Results) -> dict[str, dict[str, Any]]:
    frame = results.table("points", ["point_id", "requested"])
    return {str(k): json.loads(str(v)) for k, v in zip(*(frame[n] for n in frame), strict=True)}


def _lengths(cfg: dict[str, Any]) -> tuple[int, int]:
    return cfg["workload"]["prompt_tokens"], cfg["workload"]["output_tokens"]


def _answers(results: Results, cfg: dict[str, Any]) -> Answers:
    prompt, tokens = _lengths(cfg)
    settings = {name: value for name, value in cfg.items() if name not in ("experiment", "index")}
    path = results.run_dir / "numerics" / f"engine-{digest(settings)}.json"
    return kept(path, _run_engine, cfg, prompt, tokens)


def _reference(results: Results, cfg: dict[str, Any]) -> Answers:
    prompt, tokens = _lengths(cfg)
    name = f"{REFERENCE}-{digest([cfg['model'], prompt, tokens])}.json"
    return kept(results.run_dir / "numerics" / name, _run_reference, cfg["model"], prompt, tokens)


def _run_engine(cfg: dict[str, Any], prompt: int, tokens: int) -> Answers:
    return of_engine(cfg, prompts(cfg["model"], prompt), tokens)


def _run_reference(model: dict[str, Any], prompt: int, tokens: int) -> Answers:
    return of_transformers(model, prompts(model, prompt), tokens)


_VARIED = ("tp", "batch", "enforce_eager", "compile", "comm", "attention")


def _base(point: Point, usable: list[Point]) -> Point:
    """The point that differs from it in _VARIED alone and has the least of each."""
    rest = {name: value for name, value in point.asked.items() if name not in _VARIED}
    alike = [p for p in usable if {k: v for k, v in p.asked.items() if k not in _VARIED} == rest]
    return min(
        alike,
        key=lambda p: (p.asked["tp"], p.asked["batch"], not p.asked["enforce_eager"],
                       p.asked["compile"] != "off"),
    )  # fmt: skip


def _name(point: Point) -> str:
    return f"tp={point.asked['tp']} batch={point.asked['batch']} {point.mode}"


def verdict(frame: pd.DataFrame) -> Finding:
    """The claim holds where every first difference from transformers is a near tie; where nothing
    differs, nothing is said of it."""
    rows = frame[frame["identical"].notna()]
    own, others = rows[rows["against"] == REFERENCE], rows[rows["against"] != REFERENCE]
    diverged = own[own["diverged"] > 0]
    known = diverged[diverged["dlogprob"].notna()]
    near = known["tie"] <= TIES * known["dlogprob"]
    text = (
        f"{between(own['identical'], '.2%')} of tokens come before a difference from transformers "
        f"in float32; log-probabilities differ by {between(own['dlogprob'], '.1e')} at most; "
        + (
            f"{int(near.sum())} of {len(diverged)} points that differ do so at near ties only"
            if len(diverged)
            else "no point differs"
        )
    )
    if len(others):
        text += (
            f"; of {len(others)} other ways of running the same engine "
            f"{int((others['diverged'] == 0).sum())} give the same tokens"
        )
    if len(known) < len(diverged) or not len(diverged):
        return Finding(None, text)
    return Finding(bool(near.all()), text)


def figure(results: Results, frame: pd.DataFrame, path: Path) -> None:
    """Share of requests that are still identical to transformers after so many tokens."""
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(8, 4.5), layout="constrained")
    ax = drawing.subplots()
    asked, ran = _requested(results), [p for p in points(results) if p.failure is None]
    names = labels(frame[frame["against"] == REFERENCE], COLUMNS)
    for point, name in zip(ran, names, strict=True):
        cfg = asked[point.point_id]
        found = difference(_answers(results, cfg), _reference(results, cfg))
        left = [
            sum(place >= after for place in found.places) / len(found.places)
            for after in range(found.tokens + 1)
        ]
        ax.step(range(found.tokens + 1), left, where="post", label=name)
    ax.set_ylim(-0.03, 1.03)
    ax.set_xlabel("tokens")
    ax.set_ylabel("requests still identical")
    ax.legend(fontsize=7)
    drawing.savefig(path, dpi=120)


EXPERIMENT = Experiment(
    name="tp_numerics",
    question="Do TP size, batch and mode change which tokens greedy decoding gives?",
    claim="tokens differ from transformers in float32 only at near ties: where its two best are "
    "closer than twice the largest difference of log-probabilities elsewhere",
    source="TBIK, arXiv 2511.17826: greedy output changes with the TP size; that rounding alone "
    "does it is ours",
    columns=COLUMNS,
    summary=summary,
    figure=figure,
    verdict=verdict,
    elsewhere=(
        Elsewhere(
            "pinned channels turn a gap of 0.151 between prefill and decode into none, a tree "
            "alone does not",
            "sgl-project/sglang#34159, NCCL at TP=4",
        ),
        Elsewhere(
            "determinism whatever the batch costs 34.35 % of speed, with other kernels 61.5 %",
            "lmsys.org/blog/2025-09-22-sglang-deterministic",
        ),
    ),
)
