"""`python -m harness calibrate`: measures this machine once, and prints what it can do."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from harness.calibration.file import Calibration, path_of
from harness.calibration.measure import calibrate
from harness.calibration.parts import default_worlds, plan
from harness.calibration.tables import LEFT, WRAPPED, remarks, tables
from harness.machine.capabilities import Machine
from harness.planning.device_lock import LockError, gpu_names, held
from harness.settings.arguments import numbers
from harness.tables.console import markdown_table, print_line, print_table, stdout
from harness.tables.storage import StorageError


def main(arguments: Sequence[str]) -> int:
    """Returns 0, 1 where a part failed that this machine should measure, 2 where the command line
    is wrong, 130 if interrupted; what was measured by then is in the file."""
    parser = argparse.ArgumentParser(prog="python -m harness calibrate", add_help=False)
    parser.add_argument("--world", type=numbers)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--results-dir", default="results/runs")
    try:
        options = parser.parse_args(arguments)
    except SystemExit:
        return 2
    machine = Machine.probe()
    worlds = options.world or default_worlds(machine)
    refusal = _refusal(max(worlds), machine)
    if refusal is not None:
        print(f"calibrate: {refusal}", file=sys.stderr)
        return 2
    calibration = Calibration(path_of(options.results_dir))
    names = plan(machine, worlds)
    todo = names if options.again else calibration.missing(names)
    unwritable = calibration.unwritable() if todo else None
    if unwritable is not None:
        print(f"calibrate: --results-dir {options.results_dir}: {unwritable}", file=sys.stderr)
        return 2
    failed: list[str] = []

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def ended(name: str, reason: str | None, seconds: float) -> None:
        failed.extend([name] if reason is not None else [])
        say(f"{name}: {reason or f'{seconds:.1f} s'}")

    devices = gpu_names(max(worlds)) if machine.device == "cuda" else ["cpu"]
    try:
        with held(devices if todo else [], "wait", str(calibration.path), say):
            calibrate(calibration, todo, machine, ended, begins=lambda name: say(f"{name} ..."))
    except (LockError, StorageError) as error:
        say(f"calibrate: {error}")
        return 1
    except KeyboardInterrupt:
        print(f"interrupted; {calibration.path} has what was measured", file=sys.stderr)
        return 130
    show(calibration, options)
    return int(bool(failed))


def show(calibration: Calibration, options: argparse.Namespace) -> None:
    """Prints the whole file, in the form that was asked for."""
    if options.json:
        print(calibration.path.read_text(encoding="utf-8").rstrip("\n"))
        return
    found = tables(calibration)
    if options.markdown:
        parts = [f"{title}\n\n{markdown_table(head, rows)}".lstrip() for title, head, rows in found]
        print("\n\n".join([*parts, *(f"{remark}." for remark in remarks(calibration))]))
        return
    console = stdout()
    for title, headings, rows in found:
        print_line(console, f"\n{title}" if title else "")
        right = [heading for heading in headings if heading not in LEFT]
        print_table(console, headings, rows, wrapped=WRAPPED, right=right)
    print_line(console, "\n".join(["", *remarks(calibration), str(calibration.path)]))


def _refusal(world: int, machine: Machine) -> str | None:
    """Ranks above the cores would wait for each other in every call of gloo, for hours."""
    if machine.device == "cuda":
        what, most = f"needs {world} GPUs, {machine.gpus} visible", machine.gpus
    else:
        what, most = f"needs {world} cores, {machine.cores} usable", machine.cores
    return None if world <= most else f"--world {world} {what}; give {most} at most"
