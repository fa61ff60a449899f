"""`python -m harness [VERB] ...`: the verbs, which import what is heavy."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from harness.settings.help import help_text
from harness.settings.usage import USAGE

VERBS = ("run", "list", "profile", "collect", "compare", "calibrate", "predict", "doctor")
MODULES = {
    "compare": "harness.judging.compare",
    "calibrate": "harness.calibration.command",
    "predict": "harness.prediction.command",
}
"""Verbs that read the rest of their command line themselves, by `main`."""
FORMS = ("--markdown", "--csv", "--json", "--repeats")
"""What `collect` prints instead of its table."""
PYTHONS = ((3, 11), (3, 13))
"""The oldest and the newest Python; pyproject.toml says the same to installers."""
ACROSS = "--across-machines"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line (without the program's name) and returns its exit status.

    0: every point ended ok, skipped or contaminated; 1: one did not, or a setting is wrong, or
    this Python is none of PYTHONS; 2: the command line is empty or not understood; 130:
    interrupted. `compare` has its own: 1 where something is slower, 2 where it refuses.
    """
    unfit = unfit_python(sys.version_info[:2])
    if unfit:
        print(f"error: {unfit}", file=sys.stderr)
        return 1
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments:
        print(help_text(conf_folder()))
        return 2
    verb, named = _verb(arguments)
    if verb not in VERBS:
        print(f"{verb}: no such command; choose one of {', '.join(VERBS)}, or see "
              "python -m harness --help", file=sys.stderr)  # fmt: skip
        return 2
    if any(argument in ("--help", "-h") for argument in arguments):
        print(USAGE[verb] if named else help_text(conf_folder(), arguments))
        return 0
    if verb == "doctor":
        from harness.doctor import doctor

        if arguments:
            print(f"doctor: {arguments[0]}: it takes no arguments", file=sys.stderr)
            return 2
        return doctor()
    if verb == "collect":
        return collect(arguments)
    if verb in MODULES:
        status: int = import_module(MODULES[verb]).main(arguments)
        return status
    if verb == "profile" and "--read" in arguments:
        return read_export(arguments)
    try:
        if "TORCHELASTIC_RUN_ID" in os.environ and verb == "run":
            return under_torchrun(arguments)
        return {"run": run, "list": list_, "profile": profile}[verb](arguments)
    except KeyboardInterrupt:
        return 130


def _verb(arguments: list[str]) -> tuple[str, bool]:
    """(verb, whether it was named); a name is taken out of `arguments`, where it stands first or
    behind --config-dir DIR."""
    place = {"--config-dir": 2, "-cd": 2}.get(arguments[0], int("--config-dir=" in arguments[0]))
    word = arguments[place] if place < len(arguments) else ""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z_-]*", word):
        return "run", False
    return arguments.pop(place), True


def unfit_python(version: tuple[int, int]) -> str | None:
    """Why a Python of this (major, minor) cannot run the harness; None if it can. A checkout runs
    without an installer that would have said so."""
    oldest, newest = (".".join(map(str, python)) for python in PYTHONS)
    if PYTHONS[0] <= version <= PYTHONS[1]:
        return None
    why = "; Hydra 1.3 fails at its start on 3.14" if version > PYTHONS[1] else ""
    return (
        f"Python {version[0]}.{version[1]}: Rangefinder runs on {oldest} to {newest}{why}. Make "
        f"the environment with one of them: python{newest} -m venv .venv"
    )


def run(arguments: Sequence[str]) -> int:
    """Runs, or continues, a sweep, here or as jobs of a launcher."""
    from harness.fanout.command import fan_out
    from harness.settings import launcher
    from harness.sweep.commands import run_points

    return launcher.run(arguments, conf_folder(), run_points, fan_out)


def list_(arguments: Sequence[str]) -> int:
    """Prints the points of a sweep, or the jobs of a launcher."""
    from harness.fanout.folder import list_jobs
    from harness.settings import launcher
    from harness.sweep.commands import list_points

    return launcher.run(arguments, conf_folder(), list_points, list_jobs, "list")


def under_torchrun(arguments: Sequence[str]) -> int:
    """A sweep whose ranks are the processes that torchrun has started: the first one runs it, the
    others serve its engines."""
    from engine.ranks import nodes
    from harness.planning.device_lock import LockError, held_for_torchrun

    words = [word.split("=", 1)[1] for word in arguments if word.startswith("device_lock=")]
    try:
        with held_for_torchrun(["wait", *words][-1]), nodes.under_torchrun() as first:
            return run(arguments) if first else 0
    except LockError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def conf_folder() -> Path:
    """The folder of configuration files: beside the package in a clone, inside it in a wheel."""
    package = Path(__file__).resolve().parent
    beside = package.parent / "conf"
    return beside if (beside / "config.yaml").is_file() else package / "conf"


def collect(arguments: Sequence[str]) -> int:
    """Prints the tables of a run, or of several as one, again from their files; --markdown, --csv
    or --json to publish them, --repeats for the figures of every repeat as CSV."""
    flags = [argument for argument in arguments if argument.startswith("-")]
    folders = [Path(argument) for argument in arguments if not argument.startswith("-")]
    across = ACROSS in flags
    flags = [flag for flag in flags if flag != ACROSS]
    unknown = [flag for flag in flags if flag not in FORMS]
    if folders and (unknown or len(flags) > 1):
        why = f"{unknown[0]}: no such flag" if unknown else f"{' and '.join(flags)}: one at a time"
        print(f"collect: {why}; give {', '.join(FORMS)} or none of them", file=sys.stderr)
        return 2
    if not folders:
        print("collect: name a run folder, or several, as in python -m harness collect "
              f"results/runs/NAME [{' | '.join(FORMS)}] [{ACROSS}]", file=sys.stderr)  # fmt: skip
        return 2
    from harness.judging import repeats
    from harness.store import NoRunError, StoreError
    from harness.tables import export, merged, report
    from harness.tables.console import stdout
    from harness.tables.fan_outs import expanded

    runs = expanded(folders)
    for run in runs:
        if not (run / "plan.json").is_file():
            print(f"collect: {run} is no run folder (it has no plan.json){_below(run)}",
                  file=sys.stderr)  # fmt: skip
            return 2
    if not runs:
        print(f"collect: no job of {folders[0]} has planned its points yet", file=sys.stderr)
        return 1
    try:
        found = merged.merge(runs, across_machines=across)
        for note in found.notes:
            print(note, file=sys.stderr)
        if flags:
            make = {"--markdown": export.markdown, "--csv": export.csv, "--json": export.to_json}
            print((make | {"--repeats": repeats.csv})[flags[0]](found).rstrip("\n"))
        else:
            report.print_summary(found, stdout())
    except (merged.MachinesDiffer, NoRunError) as error:
        print(f"collect: {error}", file=sys.stderr)
        return 2
    except StoreError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _below(folder: Path) -> str:
    """The newest three runs in a folder, as what to name in its place."""
    made = {file.parent: file.stat().st_mtime for file in folder.glob("*/plan.json")}
    newest = sorted(made, key=lambda run: made[run], reverse=True)[:3]
    return f"; name one of its runs, the newest: {', '.join(map(str, newest))}" if newest else ""


def profile(arguments: Sequence[str]) -> int:
    """Runs one point under nsys."""
    from functools import partial

    from harness.nsys.verb import SWITCH, profile_point
    from harness.settings.launcher import run

    words = [*arguments, SWITCH]
    handler = partial(profile_point, words=words)
    return run(words, conf_folder(), handler, verb="profile")


def read_export(arguments: Sequence[str]) -> int:
    """Prints what an export of nsys says, on whatever machine."""
    files = [argument for argument in arguments if argument != "--read"]
    if len(files) != 1 or files[0].startswith("-"):
        print("profile --read: name one export, as in python -m harness profile --read "
              "report.sqlite", file=sys.stderr)  # fmt: skip
        return 2
    from harness.nsys.read_back import read_back
    from harness.tables.console import stdout

    return read_back(Path(files[0]), stdout())


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
