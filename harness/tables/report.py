"""The summary of a run: a row a point, as a DataFrame, a printed table or markdown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.machine.telemetry import BUSY
from harness.measuring.flags import FLAG, of_scaling
from harness.measuring.gpu_state import SHARED, THROTTLED
from harness.settings import naming
from harness.settings.config import ENGINE_AXES
from harness.store import Results, StoreError, opened
from harness.tables import engine_costs
from harness.tables.engine_costs import as_asked
from harness.tables.marker import worst_status
from harness.tables.scaling import ARRIVALS, scaling_efficiency

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

AXES = ("backend", "tp", "batch", *ENGINE_AXES[1:], "model", "model.path", "model.load_format",
        "workload", "workload.prompt_tokens", "workload.output_tokens", "workload.arrivals",
        "timing", "cache")  # fmt: skip
ALWAYS = ("tp", "batch", "enforce_eager", "compile")
RANKED = ("ok", "contaminated")
REMARKED = (BUSY, FLAG, THROTTLED, SHARED)
"""How the notes begin that the printed table shows."""

# Column -> (name, stat, further conditions) of the metrics table.
FIGURE_OF: dict[str, tuple[str, str, dict[str, str | None]]] = {
    "output_tok_s": ("output_tok_s", "mean", {}),
    "decode_tok_s": ("decode_tok_s", "mean", {}),
    "prefill_tok_s": ("prefill_tok_s", "mean", {}),
    "ttft_p50_s": ("ttft", "p50", {}),
    "queue_p50_s": ("queue", "p50", {}),
    "tpot_p50_s": ("tpot", "p50", {}),
    "step_p50_us": ("step_us", "p50", {"ranks": "max"}),
    "all_reduces_per_step": ("all_reduces_per_step", "p50", {}),
    "transfer_us_per_step": ("transfer_us_per_step", "p50", {}),
    "wait_us_per_step": ("wait_us_per_step", "p50", {"ranks": "max"}),
    "comm_share": ("comm_share", "value", {"ranks": "max"}),
    "mbu": ("mbu", "value", {}),
    "instrument_share": ("instrument_share", "value", {}),
}
BY_PHASE = ("step_p50_us", "transfer_us_per_step", "wait_us_per_step", "comm_share",
             "instrument_share")  # fmt: skip
NO_ROWS = "no point has ended yet, so there is no table"
NOTED_SHARE = 0.1
"""Of a clean step: where reading the collectives of a GPU adds more, the printed table says so."""


def summary(run: str | Path | Results, also: Sequence[str] = ()) -> pd.DataFrame:
    """One row a point, in the order of the run, or of several runs one after the other. `also`:
    settings that have a column whatever their values are.

    Columns: index, point_id, status, the axes, other settings that vary or differ from their
    default, n_process, repeats, the figures of FIGURE_OF, spread (standard deviation / median of
    output_tok_s over all repeats), scaling_efficiency, phase (that the step's figures are of:
    decode, or prefill where the workload has no pure decode step), scaling_reason (why there is
    none), engine_costs.COLUMNS, notes, reason. Of several fresh engines it is the median. Only ok
    and contaminated points have figures.
    """
    import pandas as pd

    results = opened(run)
    if len(results.folders()) > 1:
        raise StoreError(
            f"{results.run_dir} holds several runs; name one, or harness.store.merge([...])"
        )
    names = ["run_id", "point_id", "process", "repeat", "index", "status", "reason", "notes"]
    points = results.table("points", [*names, "requested", "hardware_fingerprint", *AXES])
    points["backend"] = points["backend"].fillna("native")  # skipped before there were others
    runs = list(points["run_id"].unique())
    metrics = results.table(
        "metrics", ["point_id", "process", "repeat", "name", "stat", "value", "phase", "ranks"]
    )
    costs = engine_costs.of_points(results)
    of_point = {str(k): group for k, group in metrics.groupby("point_id", sort=False)}
    rows = []
    for point_id, group in points.groupby("point_id", sort=False):
        first = group[group["status"] == worst_status(group["status"])].iloc[0]
        row: dict[str, Any] = {"index": first["index"], "point_id": point_id}
        row["place"] = runs.index(first["run_id"]), int(first["index"])
        row["settings"] = settings(str(first["requested"]))
        if points["hardware_fingerprint"].nunique() > 1:  # a column, and no ratio between two
            row["settings"]["machine"] = first["hardware_fingerprint"]
        row |= row["settings"] | {name: first[name] for name in ("status", *AXES)}
        row["n_process"] = int(group["process"].nunique())
        row["repeats"] = len(group) if first["status"] in RANKED else 0
        measured = of_point.get(str(point_id)) if first["status"] in RANKED else None
        row |= _figures(measured) | costs.get(str(point_id), {})
        notes = "; ".join(dict.fromkeys(group["notes"].dropna())) or None
        rows.append(row | {"notes": notes, "reason": first["reason"]})
    rows.sort(key=lambda row: row["place"])
    for row, (efficiency, reason) in zip(rows, scaling_efficiency(rows), strict=True):
        row |= {"scaling_efficiency": efficiency, "scaling_reason": reason}
        flag = of_scaling(int(row["tp"]), efficiency)
        row["notes"] = "; ".join(filter(None, (row["notes"], flag))) or None
    figures = [*FIGURE_OF, "spread", "scaling_efficiency", "phase", "scaling_reason"]
    more = _further(rows, also)
    names = ["index", "point_id", "status", *AXES, *more, "n_process", "repeats"]
    columns = [*names, *figures, *engine_costs.COLUMNS, "notes", "reason"]
    return pd.DataFrame(rows, columns=columns).astype(dict.fromkeys(_whole(rows, more), "Int64"))


def settings(requested: str) -> dict[str, Any]:
    """Every setting of a stored configuration that says what is measured, by its dotted name."""
    return naming.settings(json.loads(requested))


def _further(rows: list[dict[str, Any]], also: Sequence[str]) -> list[str]:
    """Settings that are not among AXES and vary over the points, or differ from their default."""
    asked = [row["settings"] for row in rows]
    names = {*naming.varying(asked), *naming.changed(asked), *also}
    known = dict.fromkeys([*(name for one in asked for name in one), *also])
    return [name for name in known if name in names and name not in AXES]


def _whole(rows: list[dict[str, Any]], names: Sequence[str]) -> list[str]:
    """Those of the settings that are integers or null: pandas alone would make floats of both."""
    kinds = {name: {type(row["settings"].get(name)) for row in rows} for name in names}
    return [name for name, found in kinds.items() if int in found <= {int, type(None)}]


def _figures(metrics: pd.DataFrame | None) -> dict[str, Any]:
    """A row's figures; None where there is none."""
    found: dict[str, Any] = dict.fromkeys([*FIGURE_OF, "spread", "scaling_efficiency", "phase"])
    if metrics is None:
        return found
    rates = metrics[(metrics["name"] == "output_tok_s") & metrics["repeat"].notna()]["value"]
    if len(rates) > 1:
        found["spread"] = float(rates.std() / rates.median())
    whole = metrics[metrics["repeat"].isna() & metrics["value"].notna()]
    steps = whole[whole["name"].isin(["step_us", "step_host_us"])]["phase"]
    found["phase"] = next((p for p in ("decode", "mixed", "prefill") if (steps == p).any()), None)
    for column, (name, stat, where) in FIGURE_OF.items():
        chosen = whole[(whole["name"] == name) & (whole["stat"] == stat)]
        for key, value in where.items():
            chosen = chosen[chosen[key] == value]
        if column in BY_PHASE:
            chosen = chosen[chosen["phase"] == found["phase"]]
        if len(chosen):
            found[column] = float(chosen["value"].median())
    return found


# Printed column: heading (in two lines where one would be wide), column of the summary, factor,
# format.
_PRINTED: tuple[tuple[str, str, float, str], ...] = (
    ("output\ntok/s", "output_tok_s", 1, ",.0f"),
    ("+-\n%", "spread", 100, ".1f"),
    ("TPOT\nms", "tpot_p50_s", 1e3, ".2f"),
    ("step\nus", "step_p50_us", 1, ",.0f"),
    ("all-reduces\n/step", "all_reduces_per_step", 1, ".0f"),
    ("transfer\nus/step", "transfer_us_per_step", 1, ",.0f"),
    ("wait\nus/step", "wait_us_per_step", 1, ",.0f"),
    ("comm\n%", "comm_share", 100, ".1f"),
    ("scaling\nefficiency", "scaling_efficiency", 1, ".2f"),
)
_MBU = ("MBU\n%", "mbu", 100.0, ".0f")
_EXTRA: tuple[tuple[str, str, float, str], ...] = (
    ("TTFT\nms", "ttft_p50_s", 1e3, ".1f"),
    ("queue\nms", "queue_p50_s", 1e3, ".1f"),
)


def view(frame: pd.DataFrame) -> tuple[list[str], list[list[str]], str]:
    """(headings, rows of text, what is equal in all rows): the axes and settings that vary and the
    printed figures; `-` is a missing figure, and a setting that is null reads `null`."""
    import pandas as pd

    varying, named = _varying(frame), [*AXES, *further(frame)]
    same = [a for a in named if a not in varying and len(frame) and pd.notna(frame[a].iloc[0])]
    printed = list(_PRINTED)
    if "workload" in frame and (frame["workload"].isin(["prefill", "trace", "nano_vllm"])).any():
        printed[2:2] = _EXTRA
    if "mbu" in frame and frame["mbu"].notna().any():
        printed.insert(-1, _MBU)
    axes = ["eager" if axis == "enforce_eager" else axis for axis in varying]
    headings = ["status", *axes, *(p[0] for p in printed), "reason"]
    rows = []
    for _, point in frame.iterrows():
        cells = [str(point["status"]), *(as_asked(point[a]) for a in varying)]
        for _, column, factor, spec in printed:
            value = point[column]
            cells.append("-" if pd.isna(value) else format(float(value) * factor, spec))
        rows.append([*cells, _remark(point)])
    return headings, rows, ", ".join(f"{a}={as_asked(frame[a].iloc[0])}" for a in same)


def further(frame: pd.DataFrame) -> list[str]:
    """The columns of a summary that are settings and not among AXES."""
    names = list(frame.columns[frame.columns.get_loc("cache") + 1 :])
    return names[: names.index("n_process")]


def _varying(frame: pd.DataFrame) -> list[str]:
    """The axes and further settings that are printed as columns."""
    named = [*AXES, *further(frame)]
    return [a for a in named if a in ALWAYS or len(set(map(str, frame[a]))) > 1]


def engines(frame: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    """(headings, rows of text): start-up and memory of each engine of the summary."""
    axes = [a for a in _varying(frame) if a != "batch" and not a.startswith("workload")]
    return engine_costs.view(frame, axes)


def remarks(frame: pd.DataFrame) -> list[str]:
    """What is said below the table."""
    said = []
    busy = int(frame["notes"].fillna("").str.contains(BUSY).sum())
    if busy:
        were = "1 point was" if busy == 1 else f"{busy} points were"
        said.append(f"{were} measured on a busy machine: do not trust times of a CPU there")
    if (frame["scaling_reason"] == ARRIVALS).any():
        said.append(f"no scaling efficiency where {ARRIVALS}")
    without = frame[(frame["status"] == "ok") & frame["scaling_reason"].notna()]
    for reason, points in without[without["scaling_reason"] != ARRIVALS].groupby(
        "scaling_reason", sort=False
    ):
        sizes = ", ".join(f"tp={tp}" for tp in points["tp"].unique())
        number = "1 point" if len(points) == 1 else f"{len(points)} points"
        said.append(f"no scaling efficiency at {sizes} ({number}): {reason}")
    return said


def remarked(notes: str) -> list[str]:
    """Those of a row's notes that a reader must see."""
    return [note for note in notes.split("; ") if note.startswith(REMARKED)]


def _remark(point: pd.Series) -> str:
    """Why a point is not ok, and what its timing disturbed."""
    import pandas as pd

    said = [] if pd.isna(point["reason"]) else [str(point["reason"])]
    share = point.get("instrument_share")
    if point["timing"] != "host" and pd.notna(share) and share > NOTED_SHARE:
        said.append(f"reading the collectives adds {share:.0%} to a step")
    notes = point.get("notes")
    if isinstance(notes, str):
        found = remarked(notes)
        busy = [note for note in found if note.startswith(BUSY)]
        said += [note for note in found if note not in busy[1:]]
        if len(busy) > 1:
            said.append(f"so were {len(busy) - 1} more of its engines")
    return "; ".join(said)


def markdown(run: str | Path | Results) -> str:
    """The printed table as markdown, with what all points share above it, remarks below."""
    from harness.tables.console import markdown_table

    frame = summary(run)
    if frame.empty:
        return NO_ROWS
    headings, rows, same = view(frame)
    lines = [same, "", markdown_table(headings, rows)]
    lines += [f"\n{remark}." for remark in remarks(frame)]
    headings, rows = engines(frame)
    if rows:
        lines += ["", markdown_table(headings, rows)]
    return "\n".join(lines)


def print_summary(run: str | Path | Results, console: Console) -> None:
    """Prints the table; reasons wrap, figures and settings do not, however narrow the console."""
    from harness.tables.console import print_line, print_table

    frame = summary(run)
    if frame.empty:
        print_line(console, NO_ROWS)
        return
    headings, rows, same = view(frame)
    print_line(console, same)
    right = [p[0] for p in (*_PRINTED, *_EXTRA, _MBU)]
    print_table(console, headings, rows, wrapped="reason", right=right)
    for remark in remarks(frame):
        print_line(console, remark)
    headings, rows = engines(frame)
    if rows:
        print_line(console, "")
        print_table(console, headings, rows, wrapped="", right=engine_costs.RIGHT)
