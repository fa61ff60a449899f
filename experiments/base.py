"""What experiments share: a claim, its source, a table, a figure, whether the claim holds."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.settings.config import as_written
from harness.store import Results, load
from harness.tables.console import markdown_table

if TYPE_CHECKING:
    import pandas as pd


class ExperimentError(ValueError):
    """A run that does not hold what an experiment needs; the text says what to measure."""


class OutError(ValueError):
    """A folder for the report that cannot be written."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table. `spec` is a format specification for its numbers, such as .1%."""

    meaning: str
    spec: str = ""


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A published figure, of another machine always."""

    figure: str
    source: str


@dataclass(frozen=True, slots=True)
class Finding:
    """Whether the claim holds in a run; None: the run cannot tell. A miss is no error."""

    holds: bool | None
    text: str


@dataclass(frozen=True, slots=True)
class Experiment:
    """One question, put to a finished run.

    Attributes:
        name: that of its file here and of conf/experiment/NAME.yaml.
        claim, source: what is tested, and who says so.
        columns: of the table that need a word; others are settings.
        summary: the run's tables -> a row a cell. Raises ExperimentError.
        figure: (tables, the summary, file to write).
        verdict: the summary -> whether the claim holds.
        elsewhere: figures to hold ours against.
    """

    name: str
    question: str
    claim: str
    source: str
    columns: Mapping[str, Column]
    summary: Callable[[Results], pd.DataFrame]
    figure: Callable[[Results, pd.DataFrame, Path], None]
    verdict: Callable[[pd.DataFrame], Finding]
    elsewhere: tuple[Elsewhere, ...] = ()


def report(experiment: Experiment, run: Path, out: Path) -> str:
    """Writes NAME.csv, NAME.png and NAME.md into `out`, and returns the last one's text.

    Raises:
        ExperimentError, StoreError: the run lacks what is needed, or cannot be read.
        OutError: `out` cannot be written; nothing was worked out.
    """
    results = load(run)
    if results.folders():  # else summary says that there is none
        _check_writable(out)
    frame = experiment.summary(results)
    frame.to_csv(out / f"{experiment.name}.csv", index=False)
    if find_spec("matplotlib") is None:
        figure = "No figure: matplotlib is not installed (pip install 'rangefinder[report]')."
    else:
        experiment.figure(results, frame, out / f"{experiment.name}.png")
        figure = f"![{experiment.name}]({experiment.name}.png)"
    text = markdown(experiment, frame, _where(results), figure)
    (out / f"{experiment.name}.md").write_text(text, encoding="utf-8")
    return text


def _check_writable(out: Path) -> None:
    """Asked before a summary, which may start engines."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise OutError(
            f"--out {out}: the report cannot be written there ({error.strerror or error}); name a "
            "folder that can be made and written"
        ) from error


def markdown(experiment: Experiment, frame: pd.DataFrame, where: str, figure: str) -> str:
    """The report: question, claim, finding, table, meanings, what others measured, figure."""
    finding = experiment.verdict(frame)
    said = {True: "holds", False: "does not hold", None: "is undecided"}[finding.holds]
    explained = [f"- `{name}`: {c.meaning}" for name, c in experiment.columns.items()]
    parts = [
        f"# {experiment.name}",
        experiment.question,
        where,
        f"Claim: {experiment.claim} ({experiment.source}).",
        f"**The claim {said}**: {finding.text}.",
        table(frame, experiment.columns),
        "\n".join(explained),
    ]
    if experiment.elsewhere:
        lines = [f"- {e.figure} ({e.source})" for e in experiment.elsewhere]
        parts.append("\n".join(["Measured by others, on other machines:", "", *lines]))
    return "\n\n".join([*parts, figure]) + "\n"


def table(frame: pd.DataFrame, columns: Mapping[str, Column]) -> str:
    """The frame as a markdown table; `-` is a missing figure, never 0."""
    specs = {name: columns[name].spec if name in columns else "" for name in frame}
    rows = [
        [_text(value, spec) for value, spec in zip(row, specs.values(), strict=True)]
        for row in frame.itertuples(index=False)
    ]
    return markdown_table(list(specs), rows)


def framed(
    rows: Sequence[Mapping[str, Any]], settings: Sequence[str], columns: Mapping[str, Column]
) -> pd.DataFrame:
    """A summary: `settings`, then `columns`. Figures are floats and counts whole numbers (2, not
    2.0) however many of them are missing; all of them may be."""
    import pandas as pd

    names = [*settings, *(name for name in columns if name not in settings)]
    frame = pd.DataFrame(rows, columns=names)
    figures = [name for name, column in columns.items() if column.spec]
    frame = frame.astype(dict.fromkeys(figures, "float64"))
    counts = [
        name
        for name in frame.select_dtypes("float").columns.difference(figures)
        if frame[name].notna().any() and (frame[name].dropna() % 1 == 0).all()
    ]
    return frame.astype(dict.fromkeys(counts, "Int64"))


MODE = ("enforce_eager", "compile")
"""Settings that a row's `mode` says as well."""


def labels(
    frame: pd.DataFrame, columns: Mapping[str, Column], also: Sequence[str] = ()
) -> list[str]:
    """A text a row, by which a figure tells it from the others: its mode where there is one, tp,
    batch, and each setting and column of `also` that differs among the rows, as a command line
    names it."""
    import pandas as pd

    with_mode = "mode" in frame
    settings = [n for n in frame if n not in columns and not (with_mode and n in MODE)]
    written = frame.map(lambda value: as_written(None if pd.isna(value) else value))
    names = [
        name
        for name in [*settings, *also]
        if name in ("tp", "batch") or written[name].nunique() > 1
    ]
    return [
        " ".join([
            *([row["mode"]] if with_mode else []), *(f"{name}={row[name]}" for name in names),
        ])
        for row in written.to_dict("records")
    ]  # fmt: skip


def lines(names: Sequence[str], *, panels: int = 1) -> tuple[Any, Any]:
    """(figure, its axes) with a line for each name, first one on top. As wide as the longest name
    needs, so that each panel keeps 5 inches."""
    from matplotlib.figure import Figure

    size = 5 * panels + 0.06 * max(map(len, names), default=0), 1.3 + 0.32 * len(names)
    drawing = Figure(figsize=size, layout="constrained")
    axes = drawing.subplots(1, panels, sharey=True, squeeze=False)[0]
    axes[0].set_yticks(range(len(names)), names, fontsize=7)
    axes[0].set_ylim(len(names) - 0.4, -0.6)
    return drawing, axes


def between(values: pd.Series, spec: str) -> str:
    """Lowest to highest, one of them where both read alike; `-` where no value is known."""
    known = values.dropna()
    if known.empty:
        return "-"
    low, high = (format(value, spec) for value in (known.min(), known.max()))
    return low if low == high else f"{low} to {high}"


def _text(value: Any, spec: str) -> str:
    import pandas as pd

    if value is None or pd.isna(value):
        return "-"
    return format(value, spec) if spec else as_written(value)


def _where(results: Results) -> str:
    """Run, machine, commit and versions, from the first row of its points."""
    import pandas as pd

    names = ["run_id", "gpu", "cpu", "git_sha", "torch_version", "driver"]
    first = results.table("points", names).iloc[0]
    values = {name: None if pd.isna(first[name]) else str(first[name]) for name in names}
    machine = values["gpu"] or values["cpu"]
    said = [f"Run {values['run_id']} on {machine}", f"torch {values['torch_version']}"]
    said += [f"driver {values['driver']}"] if values["driver"] else []
    said += [f"commit {values['git_sha'][:7]}"] if values["git_sha"] else []
    return ", ".join(said) + "."
