"""The catalogue of columns and figures as a markdown document: docs/tables.md"""

from __future__ import annotations

from collections.abc import Iterable

from harness.tables import engine_costs
from harness.tables.export import ORIGIN
from harness.tables.figures import FIGURES
from harness.tables.report import AXES, FIGURE_OF
from harness.tables.schema import ROWS, SCHEMA_VERSION, TABLES


def markdown() -> str:
    """The catalogue as a markdown document: tables with their columns, then the figures."""
    lines = [f"Schema version {SCHEMA_VERSION}. A column marked * is never null.", ""]
    for table, columns in TABLES.items():
        lines += [f"## {table}", "", f"A row is {ROWS[table]}.", ""]
        lines += ["| column | type | unit | meaning |", "|---|---|---|---|"]
        for c in columns:
            star = "*" if c.required else ""
            meaning = c.meaning.replace("|", r"\|")
            lines.append(f"| `{c.name}`{star} | {c.dtype} | {c.unit} | {meaning} |")
        lines.append("")
    lines += ["## Figures (`metrics.name`)", "", "| name | unit | meaning |", "|---|---|---|"]
    for name, figure in FIGURES.items():
        meaning = figure.meaning.replace("|", r"\|")
        lines.append(f"| `{name}` | {figure.unit} | {meaning} |")
    lines += ["", *_summary()]
    return "\n".join(lines) + "\n"


def _summary() -> list[str]:
    """The columns of a row a point, and where each comes from."""
    figures = [f"`{column}` ({name}, {stat})" for column, (name, stat, _) in FIGURE_OF.items()]
    rows = {
        "of the point, as in `points`": _quoted(("index", "point_id", "status", *AXES)),
        "any other setting that varies over the rows, or is alike in all and not its default; its "
        "dotted name, [config.md](config.md)": "`SETTING`",
        "fresh engines, and repeats of all of them": _quoted(("n_process", "repeats")),
        "a figure above and its statistic, median over fresh engines": ", ".join(figures),
        "standard deviation / median of output_tok_s over all repeats": "`spread`",
        "output_tok_s / (tp x that of tp=1, all else equal but comm), or why there is none":
            _quoted(("scaling_efficiency", "scaling_reason")),
        "steps that the step's figures are of": "`phase`",
        "of the engine's start and memory, from `phases` and `memory`":
            _quoted(engine_costs.COLUMNS),
        "what a reader must know, why the status is not ok": _quoted(("notes", "reason")),
        "as in `points`; all but run_id in CSV and JSON alone": _quoted(
            name for name in ORIGIN if name not in AXES
        ),
    }  # fmt: skip
    return [
        "## The summary (`results.summary`, `collect --csv`)",
        "",
        "A row is one point; this is no table that is stored. The printed and the markdown table",
        "have the settings that are alike in all rows in the line above them.",
        "",
        "| columns | meaning |",
        "|---|---|",
        *(f"| {columns} | {meaning} |" for meaning, columns in rows.items()),
    ]


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
