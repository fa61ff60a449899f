"""What `run` and `list` do with the composed configurations."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from engine.errors import ConfigError
from harness.config import AXES, SettingsError
from harness.fingerprint import surroundings
from harness.machine import Machine
from harness.models import ModelError
from harness.plan import Plan, build

PIPE_WIDTH = 160
"""Columns of a table where stdout is no terminal; rich would take 80 and cut the reasons."""


def make_plan(configs: Sequence[dict[str, Any]]) -> Plan | None:
    """The plan of this machine, or None after saying on stderr which setting cannot stand."""
    try:
        return build(configs, machine=Machine.probe(), surroundings=surroundings())
    except (SettingsError, ConfigError, ModelError) as error:
        print(f"error: {error}", file=sys.stderr)
        return None


def list_points(configs: Sequence[dict[str, Any]]) -> int:
    """Prints the points in the order in which `run` takes them; nothing is started or written."""
    plan = make_plan(configs)
    if plan is None:
        return 1
    console = stdout()
    console.print(headline(plan), highlight=False)
    console.print(points_table(plan))
    skipped = sum(point.skip is not None for point in plan.points)
    console.print(
        f"{len(plan.points)} points, {skipped} skipped, {plan.engine_starts} engine starts",
        highlight=False,
    )
    return 0


def points_table(plan: Plan) -> Table:
    """One row a point; an axis that has one value everywhere is no column."""
    varying = [axis for axis in AXES if len(_values(plan, axis)) > 1]
    table = Table(box=None, pad_edge=False)
    for name in ("#", "point", "engine", *varying):
        table.add_column(name, no_wrap=True)
    table.add_column("skipped because", overflow="fold")
    for point in plan.points:
        axes = (_text(point.axes[axis]) for axis in varying)
        table.add_row(
            str(point.index), point.point_id, point.engine_key[:6], *axes, point.skip or ""
        )
    return table


def headline(plan: Plan) -> str:
    """The experiment and the axes that do not vary in it."""
    same = [axis for axis in AXES if len(_values(plan, axis)) == 1]
    return f"{plan.experiment}: " + ", ".join(f"{a}={_values(plan, a)[0]}" for a in same)


def _values(plan: Plan, axis: str) -> list[str]:
    return list(dict.fromkeys(_text(point.axes[axis]) for point in plan.points))


def stdout() -> Console:
    """A console that keeps a table's columns when stdout is a pipe or a file."""
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def run_points(configs: Sequence[dict[str, Any]]) -> int:
    raise NotImplementedError
