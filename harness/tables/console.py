"""Tables on stdout or as markdown: figures are whole at any width, only explanations wrap."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

PIPE_WIDTH = 160
"""Columns of a table where stdout is no terminal; rich would take 80."""
WRAPPED_WIDTH = 24
"""Columns that a wrapped column has at least, if it holds as much."""


def stdout() -> Console:
    """A console as wide as its terminal, or PIPE_WIDTH in a pipe or a file."""
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)


def print_table(
    console: Console,
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    wrapped: str,
    right: Collection[str] = (),
) -> None:
    """Prints a table of which the column `wrapped` alone wraps. A console that is narrower than the
    other columns need gets lines longer than itself.

    Args:
        right: headings of the columns that are set to the right.
    """
    table = Table(box=None, pad_edge=False)
    for place, heading in enumerate(headings):
        lines = [line for row in (headings, *rows) for line in row[place].splitlines()]
        widest = max(map(cell_len, lines), default=0)
        wraps = heading == wrapped
        table.add_column(
            Text(heading),
            justify="right" if heading in right else "left",
            overflow="fold",
            no_wrap=not wraps,
            min_width=min(widest, WRAPPED_WIDTH) if wraps else widest,
        )
    for row in rows:
        table.add_row(*map(Text, row))
    free = console.options.update(width=1_000_000)
    needed = console.measure(table, options=free).minimum
    if console.width < needed:
        table.width = needed
    console.print(table, highlight=False, crop=False)


def print_line(console: Console, text: str) -> None:
    """One line of plain text, which nobody breaks but a terminal."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same table as markdown; in a cell a bar becomes a slash, the end of a line a space."""
    lines = (headings, ["---"] * len(headings), *rows)
    clean = ([cell.replace("|", "/").replace("\n", " ") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in clean)
