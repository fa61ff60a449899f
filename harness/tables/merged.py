"""Several runs as one: each point from one of them, and no two machines without a word"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.store import NoRunError, Results, StoreError
from harness.tables import schema
from harness.tables.fan_outs import expanded, runs_below
from harness.tables.marker import worst_status
from harness.tables.report import RANKED


class MachinesDiffer(StoreError):
    """Figures of several machines where those of one were asked for."""


class Merged(Results):
    """The tables of several runs, as `store.load` gives those of one.

    Attributes:
        runs: their folders, in the order given.
        notes: points that several runs hold and where each is taken from; versions that differ.
    """

    def __init__(
        self,
        runs: Sequence[Path],
        owners: dict[str, Path] | None,
        notes: list[str],
        *,
        folder: Path | None = None,
        tables: Sequence[str] = tuple(schema.TABLES),
        columns: Sequence[str] | None = None,
    ) -> None:
        """`owners`: the run of each point; None: all are of the only one. `folder`: that of all, if
        not the first run's; `tables` and `columns` as for `store.load`."""
        super().__init__(folder or runs[0], tables, columns)
        self.runs = list(runs)
        self.notes = notes
        self._owners = owners

    def folders(self) -> list[Path]:
        """One, since a point has one id in all of them."""
        return self.runs[:1]

    def files(self, table: str) -> list[Path]:
        return [
            path
            for run in self.runs
            for path in Results(run, self._tables, None).files(table)
            if self._owners is None or self._owners[_point_of(path)] == run
        ]


def merge(runs: Sequence[Path], *, across_machines: bool = False) -> Merged:
    """Opens several run folders as one; a fan-out's stands for the runs of its jobs.

    A point that several hold is taken from one of them: a run where it is ok (or contaminated)
    before one where it was skipped, and that before one where it failed; of equals the one with
    most fresh engines, since another may have been interrupted; then the newest.

    Raises:
        MachinesDiffer: figures of several machines, unless `across_machines`.
        NoRunError: no folder, or one that is no run.
        StoreError: a damaged file.
    """
    runs = list(dict.fromkeys(run.resolve() for run in expanded(runs)))
    if not runs:
        raise NoRunError("no run to merge: none is named, or no job has planned its points yet")
    return Merged(runs, *_owned(runs, across_machines))


def _owned(runs: Sequence[Path], across_machines: bool) -> tuple[dict[str, Path] | None, list[str]]:
    """(the run of each point, None if there is only one; notes)"""
    if len(runs) == 1:  # nothing to choose from
        return None, []
    plans = {run: _plan(run) for run in runs}
    held: dict[str, dict[Path, str]] = {}
    worth: dict[tuple[str, Path], tuple[int, int, str]] = {}
    machines: dict[str, str] = {}
    columns = ["point_id", "process", "status", "hardware_fingerprint", "gpu", "cpu"]
    for run in runs:
        points = Results(run, tuple(schema.TABLES), None).table("points", columns)
        for point_id, group in points.groupby("point_id"):
            status = held.setdefault(str(point_id), {})[run] = worst_status(group["status"])
            engines = group["process"].nunique()
            worth[str(point_id), run] = _rank(status), engines, plans[run]["created_at"]
        measured = points[points["status"].isin(RANKED)]
        device = measured["gpu"].fillna(measured["cpu"])
        for name in (device + " (" + measured["hardware_fingerprint"] + ")").dropna().unique():
            machines.setdefault(str(name), run.name)
    if len(machines) > 1 and not across_machines:
        found = "; ".join(f"{run} has {name}" for name, run in machines.items())
        raise MachinesDiffer(
            f"the runs are of different machines: {found}; --across-machines puts them in one "
            "table with a column for the machine"
        )
    notes = [*_changes(plans)]
    owners: dict[str, Path] = {}
    for point_id, statuses in held.items():
        owners[point_id] = max((worth[point_id, run], run) for run in statuses)[1]
        if len(statuses) > 1:
            said = ", ".join(f"{run.name} ({status})" for run, status in statuses.items())
            notes.append(f"point {point_id} is in {said}; taken from {owners[point_id].name}")
    return owners, notes


def of_fan_out(folder: Path, tables: Sequence[str], columns: Sequence[str] | None) -> Merged:
    """The runs of a fan-out's jobs as one, which stands where the fan-out does; of several machines
    too. `tables` and `columns` as for `store.load`.

    Raises:
        NoRunError: no job has planned its points yet.
        StoreError: a damaged file.
    """
    runs = runs_below(folder)
    if not runs:
        raise NoRunError(f"{folder}: no job has planned its points yet; read it when one has")
    return Merged(runs, *_owned(runs, True), folder=folder, tables=tables, columns=columns)


def _rank(status: str) -> int:
    return 2 if status in RANKED else int(status == "skipped")


def _plan(run: Path) -> dict[str, Any]:
    try:
        plan = json.loads((run / "plan.json").read_text(encoding="utf-8"))
        return {"created_at": str(plan["created_at"]), "surroundings": dict(plan["surroundings"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NoRunError(f"{run} is no run folder (its plan.json cannot be read)") from error


def _changes(plans: dict[Path, dict[str, Any]]) -> list[str]:
    """What else than the machine differs between the runs."""
    surroundings = [plan["surroundings"] for plan in plans.values()]
    return [
        f"the runs differ in {name}; what differs between their rows may come from that"
        for name in ("sources", "versions", "driver")
        if len({json.dumps(one.get(name), sort_keys=True) for one in surroundings}) > 1
    ]


def _point_of(path: Path) -> str:
    """points/ID/, points/ID-PROCESS/, points/ID-nsys/ -> ID."""
    return path.parent.name.split("-")[0]
