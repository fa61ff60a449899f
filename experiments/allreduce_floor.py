"""Collectives alone, with ranks that begin together, beside the same ones in decode steps."""

from __future__ import annotations

from collections.abc import Mapping
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
)
from harness.calibration.curves import CalibrationError, Curves
from harness.calibration.file import Calibration, path_of
from harness.calibration.parts import KINDS
from harness.store import Results

if TYPE_CHECKING:
    import pandas as pd

PASSES = ("graph_timed", "backlog", "host")
TOLERANCE = 0.25
"""Of an all-reduce's time in a step, against that of the same one alone."""
COLUMNS = {
    "mode": Column("how the forward ran; of a size that no step had, how it was calibrated"),
    "step": Column("decode steps of published models with a collective of that size"),
    "alone_us": Column("calibrated: median, or the mean where the timer is coarse", ".1f"),
    "p10": Column("of the calibrated time", ".1f"),
    "p90": Column("of the calibrated time", ".1f"),
    "alone_n": Column("collectives that it rests on; none: read between two sizes", ".0f"),
    "in_step_us": Column("the same statistic of transfer_us in decode steps; of a gather or a "
                         "broadcast of the root's latency, waiting included", ".1f"),
    "in_step_n": Column("collectives that it rests on", ".0f"),
    "ratio": Column("in_step_us / alone_us", ".2f"),
    "algbw": Column("GB/s alone: bytes / time; none of symm_fused, whose time holds a norm", ".3g"),
    "busbw": Column("GB/s alone: algbw x 2(n-1)/n, (n-1)/n or 1", ".3g"),
    "in_step_algbw": Column("GB/s in steps", ".3g"),
    "in_step_busbw": Column("GB/s in steps", ".3g"),
    "reason": Column("why something is missing"),
}  # fmt: skip
_KEY = ["kind", "path", "world", "mode", "bytes"]


def summary(results: Results) -> pd.DataFrame:
    """A row a kind, path, number of ranks, mode and size; in steps where the run has it, alone
    where the calibration does.

    Raises:
        ExperimentError: the run has no timed collective, its machine no calibrated one.
    """
    steps, calibrated = in_steps(results), calibration(results)
    curves = Curves(calibrated)
    at = {_key(row): row for row in calibrated}
    rows = []
    for key, of_size in steps.groupby(_KEY, sort=False):
        kind, path, world, mode, nbytes = key
        alone = _alone(at, curves, kind, path, int(world), mode, int(nbytes))
        rows.append(_row(dict(zip(_KEY, key, strict=True)), alone, of_size))
    taken = {(*_key(row)[:3], _class(row["mode"]), row["bytes"]) for row in rows}
    rows += [
        _row({name: row[name] for name in _KEY}, row, None)
        for key, row in at.items()
        if key not in taken
    ]
    rows.sort(key=lambda r: (KINDS.index(r["kind"]), r["world"], r["path"], _class(r["mode"]),
                             r["bytes"], r["mode"]))  # fmt: skip
    return framed(rows, _KEY, COLUMNS)


def in_steps(results: Results) -> pd.DataFrame:
    """Decode steps' collectives: _KEY and time_us, one row each, of rank 0. One- and two-shot are
    one path, as in a calibration, where a size decides between them too; symm_fused is one of its
    own, whose time holds the addition and the norm in steps as in a calibration."""
    from engine.comm.symmetric import ONE_SHOT, TWO_SHOT

    wanted = [*_KEY, "pass", "phase", "rank", "latency_us", "transfer_us"]
    rows = results.table("collectives", wanted)
    rows = rows[rows["pass"].isin(PASSES) & (rows["phase"] == "decode") & (rows["rank"] == 0)]
    reduces = rows["kind"] == "all_reduce"
    symmetric = rows["path"].isin([ONE_SHOT, TWO_SHOT])
    rows = rows.assign(
        time_us=rows["transfer_us"].where(reduces, rows["latency_us"]),
        path=rows["path"].mask(symmetric, "symm_mem"),
    )
    rows = rows[rows["time_us"].notna()]
    if rows.empty:
        raise ExperimentError(
            "no timed collective of a decode step; measure some by "
            "python -m harness +experiment=allreduce_floor"
        )
    return rows[[*_KEY, "time_us"]]


def calibration(results: Results) -> list[dict[str, Any]]:
    """Rows of the collectives that the run's machine was calibrated with."""
    machines = results.table("points", ["hardware_fingerprint"])["hardware_fingerprint"]
    path = path_of(results.run_dir.resolve().parent, str(machines.iloc[0]))
    rows = Calibration(path).curve_rows()
    if not rows:
        raise ExperimentError(
            f"{path} holds no calibrated collective; run python -m harness calibrate on the "
            "machine of the run"
        )
    return rows


def _class(mode: str) -> str:
    """Mode of a step -> of a calibration."""
    return "graph" if mode.startswith("graph") else "eager"


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in _KEY)


def _alone(
    at: Mapping[tuple[Any, ...], Mapping[str, Any]], curves: Curves, kind: str, path: str,
    world: int, mode: str, nbytes: int,
) -> Mapping[str, Any]:  # fmt: skip
    """The calibrated row of that size, or a time between two sizes."""
    found = at.get((kind, path, world, _class(mode), nbytes))
    if found is not None:
        return found
    try:
        if world not in curves.worlds(kind, path, _class(mode)):
            raise CalibrationError(f"not calibrated with {world} ranks")
        return {"transfer_us": curves.time_us(kind, path, _class(mode), world, nbytes)}
    except CalibrationError as error:
        return {"reason": str(error)}


def _row(
    key: dict[str, Any], alone: Mapping[str, Any], of_size: pd.DataFrame | None
) -> dict[str, Any]:
    from engine.comm.fused import FUSED
    from engine.comm.types import Kind
    from harness.measuring.roofline import bus_factor

    moves_only = key["path"] != FUSED  # whose time holds an addition and a norm too
    row: dict[str, Any] = {**key, **dict.fromkeys(c for c in COLUMNS if c != "mode")}
    factor = bus_factor(Kind[key["kind"].upper()], key["world"])
    alone_us = alone.get("transfer_us")
    row |= {"alone_us": alone_us, "p10": alone.get("p10_us"), "p90": alone.get("p90_us")}
    row |= {"alone_n": alone.get("n"), "step": alone.get("mark"), "reason": alone.get("reason")}
    if alone_us is not None and alone_us > 0 and moves_only:
        row["algbw"] = key["bytes"] / alone_us / 1e3
        row["busbw"] = row["algbw"] * factor
    if of_size is None:
        return row | {"reason": row["reason"] or "no such collective in a decode step of the run"}
    times = of_size["time_us"]
    time_us = float(times.median() if alone.get("stat") == "p50" else times.mean())
    row |= {"in_step_us": time_us, "in_step_n": len(times)}
    if time_us > 0 and moves_only:
        row["in_step_algbw"] = key["bytes"] / time_us / 1e3
        row["in_step_busbw"] = row["in_step_algbw"] * factor
    if alone_us is not None and alone_us > 0:
        row["ratio"] = time_us / alone_us
    return row


def figure(results: Results, frame: pd.DataFrame, path: Path) -> None:
    """All-reduces: time against bytes, lines alone with p10 to p90, marks in decode steps."""
    from matplotlib.figure import Figure

    frame = frame[frame["kind"] == "all_reduce"]
    drawing = Figure(figsize=(8, 5), layout="constrained")
    ax = drawing.subplots()
    groups = frame.groupby(["world", "path", frame["mode"].map(_class)])
    for place, (key, rows) in enumerate(groups):
        label, color = f"{key[1]}, {key[0]} ranks, {key[2]}", f"C{place}"
        alone = rows.drop_duplicates("bytes").sort_values("bytes")
        ax.plot(alone["bytes"], alone["alone_us"], color=color, label=f"{label}, alone")
        ax.fill_between(alone["bytes"], alone["p10"], alone["p90"], color=color, alpha=0.15)
        ax.plot(rows["bytes"], rows["in_step_us"], "o", color=color, label=f"{label}, in steps")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xlabel("bytes")
    ax.set_ylabel("us, less the floor")
    ax.legend(fontsize=8)
    drawing.savefig(path, dpi=120)


def verdict(frame: pd.DataFrame) -> Finding:
    """The claim holds where every all-reduce's ratio is within TOLERANCE of 1. One that is not, but
    whose time in a step lies within p10 to p90 of the times alone, says nothing: those scatter as
    far."""
    both = frame[(frame["kind"] == "all_reduce") & frame["ratio"].notna()]
    if both.empty:
        return Finding(None, "no all-reduce was measured both alone and in a step")
    off = both[(both["ratio"] - 1).abs() > TOLERANCE]
    scattered = off[(off["p10"] <= off["in_step_us"]) & (off["in_step_us"] <= off["p90"])]
    text = (
        f"in steps all-reduces take {between(both['ratio'], '.2f')} of their time alone; "
        f"{len(off)} of {len(both)} sizes and modes are more than {TOLERANCE:.0%} off"
    )
    if len(scattered):
        text += f", {len(scattered)} of them within p10 to p90 of the times alone"
    return Finding(True if off.empty else False if len(off) > len(scattered) else None, text)


_PEER = "github.com/waynehacking8/nccl-collectives-bench, results/tp_latency_report.md"
EXPERIMENT = Experiment(
    name="allreduce_floor",
    question="Does a collective take as long in a decode step as it does alone, with ranks that "
    "begin together?",
    claim="an all-reduce costs in a step what it costs alone, so that the latter times 2L + 1 is "
    "the communication of a step",
    source=f"the communication-only ceilings of {_PEER}",
    columns=COLUMNS,
    summary=summary,
    figure=figure,
    verdict=verdict,
    elsewhere=(
        Elsewhere(
            "1 to 128 KB: 21 to 24 us launched (47 at 8 KB), 11.8 to 13.8 us in a graph",
            f"{_PEER}, 4 of 8 H100 without other tenants, bf16",
        ),
        Elsewhere("1 MB: 22.0 launched, 21.4 in a graph; 4 MB: 40.5 and 43.3 us", "the same"),
        Elsewhere(
            "0.5 MB: one-shot 10, NCCL 17, multimem 16, two-shot 18 us; 4 MB: 38, 37, 33, 29",
            "github.com/vllm-project/vllm/pull/24111, H100, 4 ranks, bf16",
        ),
        Elsewhere(
            "2 KiB: 48.7 us launched; in a graph 16.5 us by NCCL, 8.95 by symmetric memory",
            "github.com/sgl-project/sglang/pull/10571, number of ranks not stated",
        ),
    ),
)
