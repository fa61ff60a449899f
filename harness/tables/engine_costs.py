"""What an engine cost before its points: start-up by phase, compile cache, memory"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

    from harness.store import Results

STARTUP = ("total", "spawn", "load", "compile", "capture", "warmup")
MEMORY = ("weights", "kv", "graph_pool", "peak", "device_used")
COLUMNS = (
    *(f"start_{phase}_s" for phase in STARTUP),
    "compile_cache",
    *(f"memory_{name}_bytes" for name in MEMORY),
)

# Printed column: heading, column of the summary, factor, format.
_PRINTED: tuple[tuple[str, str, float, str], ...] = (
    ("start-up\ns", "start_total_s", 1, ".1f"),
    ("load\ns", "start_load_s", 1, ".1f"),
    ("compile\ns", "start_compile_s", 1, ".1f"),
    ("capture\ns", "start_capture_s", 1, ".1f"),
    ("weights\nGB", "memory_weights_bytes", 1e-9, ".2f"),
    ("K/V\nGB", "memory_kv_bytes", 1e-9, ".2f"),
    ("graphs\nGB", "memory_graph_pool_bytes", 1e-9, ".2f"),
    ("peak\nGB", "memory_peak_bytes", 1e-9, ".2f"),
)
RIGHT = tuple(heading for heading, *_ in _PRINTED)


def of_points(results: Results) -> dict[str, dict[str, Any]]:
    """point_id -> COLUMNS, of the engine that measured the point: seconds of start-up (the slowest
    rank's; median over fresh engines), what the compile cache held (cold: nothing, warm: all, part;
    cold+warm where it was so for some engines and so for others, of which the seconds are the
    median; None where nothing was compiled), and bytes after the point (the fullest rank's)."""
    phases = results.table("phases", ["point_id", "process", "phase", "bucket", "seconds", "count"])
    memory = results.table("memory", ["point_id", "name", "bytes"])
    seconds = phases[phases["bucket"].isna()].groupby(["point_id", "phase"])["seconds"].median()
    states = _cache_states(phases)
    most = memory.groupby(["point_id", "name"])["bytes"].max()
    found: dict[str, dict[str, Any]] = {}
    for point_id in phases["point_id"].unique():
        row: dict[str, Any] = {f"start_{p}_s": _get(seconds, point_id, p) for p in STARTUP}
        row["compile_cache"] = "+".join(states.get(str(point_id), ())) or None
        row |= {f"memory_{n}_bytes": _get(most, point_id, f"{n}_bytes") for n in MEMORY}
        found[str(point_id)] = row
    return found


def _cache_states(phases: pd.DataFrame) -> dict[str, list[str]]:
    """point_id -> what the cache held for its engines, each state once, in the engines' order."""
    rows = phases[phases["phase"].isin(["cache_hits", "cache_misses"])]
    counts = rows.pivot_table(
        index=["point_id", "process"], columns="phase", values="count", aggfunc="max"
    )
    counts = counts.reindex(columns=["cache_hits", "cache_misses"]).fillna(0)
    found: dict[str, list[str]] = {}
    for (point_id, _), hits, misses in counts.itertuples():
        states = found.setdefault(str(point_id), [])
        state = cache_state(hits, misses)
        if state is not None and state not in states:
            states.append(state)
    return found


def cache_state(hits: float, misses: float) -> str | None:
    """What a compile cache held; None where nothing was compiled."""
    if not hits and not misses:
        return None
    return "part" if hits and misses else "warm" if hits else "cold"


def _get(series: pd.Series, point_id: str, name: str) -> float | None:
    import pandas as pd

    value = series.get((point_id, name))
    return None if value is None or pd.isna(value) else float(value)


def as_asked(value: Any) -> str:
    """A setting out of a frame, which may hold null as NaN, as a command line has it."""
    import pandas as pd

    from harness.settings.config import as_written

    if pd.isna(value):
        return "null"
    return as_written(value.item() if hasattr(value, "item") else value)


def view(frame: pd.DataFrame, axes: list[str]) -> tuple[list[str], list[list[str]]]:
    """(headings, rows of text) of the engines of a summary, one row each: points of one engine have
    the same start-up, and the highest of their peaks. `axes`: columns that tell engines apart."""
    import pandas as pd

    started = frame[frame["start_total_s"].notna()]
    if started.empty:
        return [], []
    started = started.assign(
        memory_peak_bytes=started.groupby([*axes, "start_total_s"], dropna=False)[
            "memory_peak_bytes"
        ].transform("max")
    )
    engines = started.drop_duplicates([*axes, "start_total_s"])
    names = ["eager" if axis == "enforce_eager" else axis for axis in axes]
    headings = [*names, "compile\ncache", *(p[0] for p in _PRINTED)]
    rows = []
    for _, engine in engines.iterrows():
        cache = engine["compile_cache"]
        cells = [as_asked(engine[axis]) for axis in axes] + ["-" if pd.isna(cache) else cache]
        for _, column, factor, spec in _PRINTED:
            value = engine[column]
            cells.append("-" if pd.isna(value) else format(float(value) * factor, spec))
        rows.append(cells)
    return headings, rows
