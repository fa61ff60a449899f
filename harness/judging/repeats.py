"""The figures of every repeat of a run, a row each: what verdicts rest on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.store import Results, StoreError, load
from harness.tables.fan_outs import is_fan_out
from harness.tables.schema import SCHEMA_VERSION, STATUSES

if TYPE_CHECKING:
    import pandas as pd

FILE = "repeats.csv"
"""Name under which a published folder holds them."""
KEY = ["point_id", "process", "repeat"]
_TEXT = ["status", "reason", "hardware_fingerprint", "gpu", "cpu", "git_sha", "torch_version",
         "requested", "effective", "notes"]  # fmt: skip
_POINT = ["run_id", *KEY, "index", *_TEXT]


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure that each repeat has. `better`: higher or lower. Its unit is in
    harness/tables/figures.py; of requests and steps it is their median."""

    better: str
    table: str


METRICS: dict[str, Metric] = {
    "output_tok_s": Metric("higher", "metrics"),
    "total_tok_s": Metric("higher", "metrics"),
    "prefill_tok_s": Metric("higher", "metrics"),
    "decode_tok_s": Metric("higher", "metrics"),
    "tok_s_per_gpu": Metric("higher", "metrics"),
    "ttft": Metric("lower", "requests"),
    "queue": Metric("lower", "requests"),
    "tpot": Metric("lower", "requests"),
    "e2e": Metric("lower", "requests"),
    "step_us": Metric("lower", "steps"),
    "step_host_us": Metric("lower", "steps"),
}
COLUMNS = ["schema_version", *_POINT, *METRICS, "step_source", "sm_clock_mhz"]
LATER = ("effective", "notes")
"""Columns that published files may lack, which were written before there were these."""


def repeats(results: Results) -> pd.DataFrame:
    """A row a point, fresh engine and repeat, in the order of the plan, with COLUMNS; a figure that
    was not measured is null.

    `requested` is the point's configuration as JSON, `effective` what its engine read back (null
    where none came up), `notes` what its row says of the machine meanwhile; both are null in files
    published before there were these columns. step_us is the slowest
    rank's and, like step_host_us, of decode steps where there is one, else of mixed ones, else of
    prefill; step_source says whose clock it is. On a GPU the step pass runs once an engine, so only
    repeat 0 has step_us. sm_clock_mhz is that of the table of points.
    """
    frame = results.table("points", [*_POINT, "sm_clock_mhz"])
    frame.insert(0, "schema_version", SCHEMA_VERSION)
    for read in (_rates, _requests, _steps):
        found = read(results)
        frame = frame.merge(found, on=KEY, how="left")
    return frame[COLUMNS].sort_values(["index", *KEY], kind="stable", ignore_index=True)


def read(folder: str | Path) -> pd.DataFrame:
    """The repeats of a run folder, a fan-out's, or a published one, which holds points/ or
    repeats.csv; of that file itself as well.

    Raises:
        StoreError: neither is there, a damaged file, another schema version, no row.
    """
    path = Path(folder)
    file = path / FILE if path.is_dir() else path
    if (path / "points").is_dir() or is_fan_out(path):
        frame = repeats(load(path))
    elif file.is_file():
        frame = _read_csv(file)
    else:
        raise StoreError(
            f"{path}: no run folder (it has no points/) and no {FILE}, which python -m harness "
            "collect RUN --repeats prints"
        )
    if frame.empty:
        raise StoreError(f"{path} holds no point that has ended")
    return frame


def csv(run: str | Path | Results) -> str:
    """The repeats of a run as CSV; a missing figure is an empty field."""
    frame = repeats(run) if isinstance(run, Results) else read(run)
    return str(frame.to_csv(index=False))


def phase_of(phases: pd.Series) -> str | None:
    """Of which steps a point's step times are: decode, else mixed, else prefill."""
    present = set(phases)
    return next((phase for phase in ("decode", "mixed", "prefill") if phase in present), None)


def _read_csv(file: Path) -> pd.DataFrame:
    import pandas as pd

    types = dict.fromkeys((*_TEXT, "run_id", "point_id", "step_source"), "string")
    try:
        frame = pd.read_csv(file, dtype=types)
    except (OSError, ValueError) as error:
        raise StoreError(f"{file} is no CSV: {' '.join(str(error).split())}") from error
    missing = [name for name in COLUMNS if name not in (*LATER, *frame)]
    if missing:
        summary = "spread" in frame and "repeat" not in frame
        what = "the summary of a run, which has no repeats" if summary else "another table"
        raise StoreError(
            f"{file} is {what} (no column {missing[0]}); publish python -m harness collect RUN "
            f"--repeats as {FILE}, or the run folder"
        )
    versions = sorted(set(frame["schema_version"]))
    if versions not in ([], [SCHEMA_VERSION]):
        raise StoreError(
            f"{file}: schema version {', '.join(map(str, versions))}, this harness reads "
            f"{SCHEMA_VERSION}; read it with the version that wrote it"
        )
    frame = frame.reindex(columns=COLUMNS)
    _check(file, frame)
    return frame


def _check(file: Path, frame: pd.DataFrame) -> None:
    """That each value is one that `csv` writes, so that an edited or damaged file is an error that
    names the row, and no verdict.

    Raises:
        StoreError: it is not.
    """
    import pandas as pd

    def refuse(wrong: pd.Series, name: str, what: str) -> None:
        if wrong.any():
            place = int(wrong.to_numpy().argmax())
            raise StoreError(
                f"{file}, row {place + 1}: {name}={frame[name].iloc[place]}: {what}; publish "
                f"python -m harness collect RUN --repeats as {FILE} again"
            )

    for name in ("process", "repeat", "index", *METRICS, "sm_clock_mhz"):
        numbers = pd.to_numeric(frame[name], errors="coerce")
        refuse(numbers.isna() & frame[name].notna(), name, "no number")
        frame[name] = numbers
    for name in ("run_id", "status", "requested", *KEY):
        refuse(frame[name].isna(), name, "it may not be empty")
    refuse(~frame["status"].isin(STATUSES), "status", f"none of {', '.join(STATUSES)}")
    for name in ("requested", "effective"):
        refuse(frame[name].notna() & ~frame[name].map(_is_object), name, "no JSON object")
    refuse(
        frame.duplicated(["run_id", *KEY], keep=False), "point_id", "this repeat stands there twice"
    )


def _is_object(text: Any) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, TypeError, RecursionError):
        return False


def _rates(results: Results) -> pd.DataFrame:
    rows = results.table("metrics", [*KEY, "name", "stat", "value"])
    names = [name for name, metric in METRICS.items() if metric.table == "metrics"]
    rows = rows[rows["repeat"].notna() & rows["name"].isin(names) & (rows["stat"] == "value")]
    wide = rows.pivot_table(index=KEY, columns="name", values="value", dropna=False)
    return wide.reindex(columns=names).reset_index()


def _requests(results: Results) -> pd.DataFrame:
    names = [name for name, metric in METRICS.items() if metric.table == "requests"]
    rows = results.table("requests", [*KEY, "pass", *names])
    return rows[rows["pass"] == "plain"].groupby(KEY)[names].median().reset_index()


def _steps(results: Results) -> pd.DataFrame:
    rows = results.table(
        "steps", [*KEY, "pass", "phase", "rank", "step", "device_us", "host_us", "source"]
    )
    rows = rows[rows["pass"].isin(["plain", "step"])]
    phase = rows.groupby("point_id")["phase"].transform(phase_of)
    rows = rows[rows["phase"] == phase]
    timed = rows[rows["device_us"].notna()]
    slowest = timed.groupby([*KEY, "step"])["device_us"].max()
    host = rows[(rows["pass"] == "plain") & (rows["rank"] == 0)]
    columns = {
        "step_us": slowest.groupby(KEY).median(),
        "step_host_us": host.groupby(KEY)["host_us"].median(),
        "step_source": timed.groupby(KEY)["source"].first(),
    }
    return _beside(columns)


def _beside(columns: dict[str, Any]) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame(columns).rename_axis(KEY).reset_index()
