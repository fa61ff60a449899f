"""`python -m harness [run|list|collect|doctor] ...`: the verbs, which import what is heavy."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from harness.help import help_text

VERBS = ("run", "list", "collect", "doctor")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line (without the program's name) and returns its exit status.

    0: every point ended ok, skipped or contaminated; 1: one did not, or a setting is wrong;
    2: the command line is not understood; 130: interrupted.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    verb = "run"
    if arguments and re.fullmatch(r"[A-Za-z_-]+", arguments[0]) and arguments[0][0] != "-":
        verb = arguments.pop(0)
    if verb not in VERBS:
        print(f"{verb}: no such command; choose one of {', '.join(VERBS)}, or see "
              "python -m harness --help", file=sys.stderr)  # fmt: skip
        return 2
    if any(argument in ("--help", "-h") for argument in arguments):
        print(help_text(conf_folder(), arguments))
        return 0
    if verb == "doctor":
        from harness.doctor import doctor

        return doctor()
    if verb == "collect":
        return collect(arguments)
    from harness.commands import list_points, run_points
    from harness.launcher import run

    try:
        return run(arguments, conf_folder(), list_points if verb == "list" else run_points)
    except KeyboardInterrupt:
        return 130


def conf_folder() -> Path:
    """The folder of configuration files: beside the package in a clone, inside it in a wheel."""
    package = Path(__file__).resolve().parent
    beside = package.parent / "conf"
    return beside if (beside / "config.yaml").is_file() else package / "conf"


def collect(arguments: Sequence[str]) -> int:
    """Prints the tables of a run again, from its files; --markdown or --csv to publish them."""
    flags = [argument for argument in arguments if argument.startswith("-")]
    folders = [argument for argument in arguments if not argument.startswith("-")]
    if len(folders) != 1 or len(flags) > 1 or set(flags) - {"--markdown", "--csv"}:
        print("collect: name one run folder, as in python -m harness collect results/runs/NAME "
              "[--markdown | --csv]", file=sys.stderr)  # fmt: skip
        return 2
    run = Path(folders[0])
    if not (run / "plan.json").is_file():
        print(f"collect: {run} is no run folder (it has no plan.json)", file=sys.stderr)
        return 2
    from harness import report
    from harness.console import stdout
    from harness.store import StoreError

    try:
        if flags:
            text = report.csv(run) if flags == ["--csv"] else report.markdown(run)
            print(text.rstrip("\n"))
        else:
            report.print_summary(run, stdout())
    except StoreError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def entry() -> NoReturn:
    """The program: `main`, and quiet where the reader of its output has left (`... | head`)."""
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes stdout once more at its end, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 128 + signal.SIGPIPE
    sys.exit(status)


if __name__ == "__main__":
    entry()
