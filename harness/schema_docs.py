"""The catalogue of columns and figures as a markdown document: docs/tables.md"""

from __future__ import annotations

from harness.figures import FIGURES
from harness.schema import ROWS, SCHEMA_VERSION, TABLES


def markdown() -> str:
    """The catalogue as a markdown document: tables with their columns, then the figures."""
    lines = [f"Schema version {SCHEMA_VERSION}. A column marked * is never null.", ""]
    for table, columns in TABLES.items():
        lines += [f"## {table}", "", f"A row is {ROWS[table]}.", ""]
        lines += ["| column | type | unit | meaning |", "|---|---|---|---|"]
        for c in columns:
            star = "*" if c.required else ""
            lines.append(f"| `{c.name}`{star} | {c.dtype} | {c.unit} | {c.meaning} |")
        lines.append("")
    lines += ["## Figures (`metrics.name`)", "", "| name | unit | meaning |", "|---|---|---|"]
    lines += [f"| `{name}` | {f.unit} | {f.meaning} |" for name, f in FIGURES.items()]
    return "\n".join(lines) + "\n"
