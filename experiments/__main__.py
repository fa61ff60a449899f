"""`python -m experiments NAME RUN [--out DIR]`: an experiment's table, figure and finding."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from engine.errors import ConfigError
from experiments.base import Experiment, ExperimentError, OutError, report
from harness.store import NoRunError, StoreError

OWN = ("base", "greedy", "intervals", "points", "repeated", "step_parts", "__init__",
       "__main__")  # fmt: skip


def names() -> list[str]:
    """The experiments that have a file here."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return [path.stem for path in files if path.stem not in OWN]


def experiment(name: str) -> Experiment:
    """The experiment of a file here."""
    found = import_module(f"experiments.{name}").EXPERIMENT
    assert isinstance(found, Experiment) and found.name == name
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the report of a finished run and prints it.

    Returns 0 whatever was found, 1 where the run cannot answer, 2 where the command line is wrong,
    the run is missing, or the report cannot be written.
    """
    listed = "\n".join(f"  {name}: {experiment(name).question}" for name in names())
    parser = argparse.ArgumentParser(
        prog="python -m experiments",
        description="Answers a question from a finished run.",
        epilog=f"experiments (run one by python -m harness +experiment=NAME)\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=names())
    parser.add_argument("run", type=Path, help="a run folder below results/runs")
    parser.add_argument("--out", type=Path, help="folder for NAME.md, .csv and .png; RUN/report")
    try:
        options = parser.parse_args(arguments)
    except SystemExit as stopped:
        return int(stopped.code or 0)
    try:
        out = options.out or options.run / "report"
        print(report(experiment(options.name), options.run, out).rstrip("\n"))
        print(f"written to {out / options.name}.md, with its table and figure", file=sys.stderr)
    except (ExperimentError, OutError, StoreError, ConfigError, OSError) as error:
        print(f"{options.name}: {error}", file=sys.stderr)
        return 2 if isinstance(error, (OutError, NoRunError)) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
