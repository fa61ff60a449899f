"""An export read and printed; in a run's folder, its tables are written there too"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import ConfigError
from harness.measuring.attribution import AttributionError
from harness.measuring.pass_plan import NSYS
from harness.nsys import results
from harness.nsys.join import Profile, join
from harness.nsys.known import FromRun
from harness.nsys.place import JoinError
from harness.nsys.reader import Export, ExportError, read
from harness.nsys.summary import print_profile
from harness.planning.plan import load_model
from harness.store import StoreError, load

if TYPE_CHECKING:
    from rich.console import Console

    from harness.rows.figures import FigureRows

FOLDER = f"-{NSYS}"
"""Ending of the folder of a point's profile, beside the point's own."""


def read_back(sqlite: Path, console: Console) -> int:
    """Prints the tables of an export. In a run's folder, points/<point>-nsys/, it is joined with
    what the run's tables say of its steps, and leaves tables of its own there; elsewhere it is read
    by itself. -> exit status; an error is printed with what it concerns."""
    try:
        export = read(sqlite)
        run = sqlite.resolve().parent.parent.parent
        of_run = sqlite.resolve().parent.name.endswith(FOLDER) and (run / "plan.json").is_file()
        profile, figures = _with_run(export, run) if of_run else (join(export), None)
    except (ExportError, JoinError, AttributionError, StoreError, ConfigError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print_profile(console, profile, figures)
    return 0


def _with_run(export: Export, run: Path) -> tuple[Profile, FigureRows]:
    folder = export.path.resolve().parent
    point_id = folder.name.removesuffix(FOLDER)
    found = load(run)
    plan = json.loads((run / "plan.json").read_text(encoding="utf-8"))
    cfg = next((p["cfg"] for p in plan["points"] if p["point_id"] == point_id), None)
    if cfg is None:
        raise StoreError(f"{folder}: the plan of {run} has no point {point_id}")
    profile = join(export, FromRun(found, point_id))
    if len(profile.views) != cfg["tp"]:
        raise JoinError(
            f"{export.path}: {len(profile.views)} of {cfg['tp']} ranks opened step ranges (process "
            f"{', '.join(str(view.pid) for view in profile.views)}); nsys did not record the others"
        )
    rows = found.collectives
    rows = rows[(rows["point_id"] == point_id) & (rows["pass"] != NSYS)]
    key = {"run_id": run.name, "point_id": point_id, "process": 0}
    shape = load_model(cfg["model"]).shape
    return profile, results.write(folder, key, profile, shape, rows)
