"""A decode step in parts, each of them measured by itself, on each rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from experiments.points import Point, points
from harness.measuring.pass_plan import GRAPH, LATENCY, PROFILER, STEP
from harness.store import Results

if TYPE_CHECKING:
    import pandas as pd

KEY = ["point_id", "process", "rank"]
PARTS = ("compute_us", "gap_us", "transfer_us", "wait_us", "gather_us", "handover_us")
"""They add up to a step. `gap_us`: no kernel runs. In replays that is what lies between kernels
that compute: a pair of stamps round a collective holds the gaps beside it. Behind a backlog there
are none, so that of launched steps all gaps count."""
_KERNELS = ("compute_us", "idle_us", "idle_comm_us", "device_us", "kernels")
_INNER = ["collectives", "kernels", "reading_us"]


def step_parts(results: Results) -> pd.DataFrame:
    """A row a point, engine and rank; means over decode steps, which add up as medians do not.

    step_us: of the clean step (GPU: pass step, stamps; CPU: plain, the host's clock).
    compute_us, launch_gap_us, beside_us (its part next to a communication kernel), profiled_us
        (first kernel to last): CUPTI, pass profiler; null without one.
    transfer_us, wait_us: of the all-reduces. gather_us: of gather and broadcast on this rank,
        waiting included. Stamps (CPU: the host's clock), waits of launched steps by CUPTI: behind
        a backlog the ranks do not wait as a user's would.
    handover_us: what a pair of stamps reads round the smallest kernel, times the collectives, less
        what the stamps themselves run (_stamps); it is taken off their latencies, and a part of a
        replayed step. 0 in launched steps, where it is in the gaps.
    gap_us: see PARTS.
    """
    import pandas as pd

    frame = pd.concat([_steps(results), _kernels(results), _collectives(results)], axis=1)
    replayed = frame["replayed"].fillna(False).astype(bool)
    alone = [point.point_id for point in points(results) if point.everything["tp"] == 1]
    solo = frame.index.get_level_values("point_id").isin(alone)  # others may just not be timed
    for name in ("transfer_us", "wait_us", "gather_us", "handover_us"):
        frame.loc[solo, name] = 0.0
    own = frame["launch_gap_us"]
    frame["gap_us"] = own.where(~replayed | solo, own - frame["beside_us"])
    frame["handover_us"] -= _stamps(frame).where(~solo, 0.0)
    frame.loc[~replayed, "handover_us"] = 0.0
    # Whether they were replays is not known either, nor which gaps lie inside a pair.
    frame.loc[frame["step_us"].isna() & ~solo, ["gap_us", "handover_us"]] = float("nan")
    return frame.drop(columns=_INNER).reset_index()


def _stamps(frame: pd.DataFrame) -> pd.Series:
    """us that the stamps inside the pairs of a replayed step run: one a collective, half of the one
    before it and half of the one behind. Reading (the timed step less the clean one) costs two
    stamps a collective and their hand-overs to the kernel that follows, of which each lasts as long
    as those between kernels that compute. On H200s a stamp runs 0.9 us of a floor of 2.0."""
    collectives = frame["collectives"]
    between = frame["kernels"] - 1 - 2 * collectives
    return frame["reading_us"] / 2 - collectives * frame["gap_us"] / between.where(between > 0)


def _steps(results: Results) -> pd.DataFrame:
    rows = results.table("steps", [*KEY, "pass", "phase", "mode", "device_us"])
    every = rows[(rows["phase"] == "decode") & rows["device_us"].notna()]
    stepped = every["point_id"].isin(every[every["pass"] == STEP]["point_id"])
    rows = every[every["pass"] == stepped.map({True: STEP, False: "plain"})]
    groups = rows.groupby(KEY)
    replayed = groups["mode"].first().astype(str).str.startswith("graph")
    timed = every[every["pass"] == GRAPH].groupby(KEY)["device_us"].median()
    reading = timed - groups["device_us"].median()
    return (
        groups["device_us"].mean().to_frame("step_us").assign(replayed=replayed, reading_us=reading)
    )


def _kernels(results: Results) -> pd.DataFrame:
    rows = results.table("steps", [*KEY, "pass", "phase", *_KERNELS])
    rows = rows[(rows["pass"] == PROFILER) & rows["compute_us"].notna()]
    found = rows.groupby(KEY)[list(_KERNELS)].mean()
    return found.rename(
        columns={
            "idle_us": "launch_gap_us",
            "idle_comm_us": "beside_us",
            "device_us": "profiled_us",
        }
    )


def _collectives(results: Results) -> pd.DataFrame:
    import pandas as pd

    columns = ["pass", "phase", "step", "kind", "mode", "latency_us", "transfer_us", "wait_us",
               "kernel_us", "floor_us"]  # fmt: skip
    rows = results.table("collectives", [*KEY, *columns])
    rows = rows[rows["phase"] == "decode"]
    timed = rows[rows["pass"].isin(LATENCY) & rows["latency_us"].notna()]
    profiled = rows[(rows["pass"] == PROFILER) & rows["kernel_us"].notna()]
    reduces = timed[timed["kind"] == "all_reduce"]
    rooted = timed[timed["kind"] != "all_reduce"]
    by_cupti = profiled[profiled["kind"] == "all_reduce"]
    found = pd.DataFrame(
        {
            "collectives": timed.groupby([*KEY, "step"]).size().groupby(KEY).mean(),
            "transfer_us": _per_step(reduces, "transfer_us"),
            "wait_us": _per_step(reduces, "wait_us"),
            "gather_us": _per_step(rooted, "latency_us"),
            "handover_us": _per_step(timed, "floor_us"),
            "cupti_wait_us": _per_step(by_cupti, "wait_us"),
            "on_gpu": timed.groupby(KEY)["pass"].first() != "host",
        }
    )
    # Steps that gather nothing spend none; of steps that nobody timed there is no figure.
    found["gather_us"] = found["gather_us"].fillna(0.0).where(found["collectives"].notna())
    replayed = timed.groupby(KEY)["mode"].first().astype(str).str.startswith("graph")
    replayed = replayed.reindex(found.index).fillna(False).astype(bool)
    launched = found["on_gpu"].fillna(False).astype(bool) & ~replayed
    found["wait_us"] = found["wait_us"].where(~launched, found["cupti_wait_us"])
    return found.drop(columns=["cupti_wait_us", "on_gpu"])


def _per_step(rows: pd.DataFrame, column: str) -> pd.Series:
    """Of each step its sum, then the mean over steps; those that lack one of their figures, which
    another rank did not give, are left out: a sum of the others would be too small."""
    steps = rows.groupby([*KEY, "step"])[column]
    return steps.sum().where(steps.count() == steps.size()).groupby(KEY).mean()


def why_not(point: Point, row: dict[str, Any]) -> str | None:
    """Why the parts cannot be added up; None if they can."""
    import pandas as pd

    if point.failure is not None:
        return point.failure
    wanted = ("step_us", *PARTS)
    absent = [name for name in wanted if row.get(name) is None or pd.isna(row[name])]
    if not absent:
        return None
    if point.everything["device"] == "cpu":
        return "a CPU has no kernels to time"
    if absent == ["handover_us"]:
        return "handover_us: the run lacks the number of kernels or the time of a timed step"
    return f"{', '.join(absent)} not measured (instrument collectives, profiler)"
