"""The text of `python -m harness --help`, made without importing anything heavy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from harness.settings.config import AXES, CHOICES

_TEXT = """\
Measures tensor-parallel inference, collective by collective.

  python -m harness +experiment=NAME [SETTING=VALUE ...]        run a sweep, or continue it
  python -m harness list +experiment=NAME [SETTING=VALUE ...]   print its points in their order
  python -m harness profile +experiment=NAME [SETTING=VALUE]    run one point under nsys
  python -m harness profile --read EXPORT.sqlite                what an export of nsys says
  python -m harness collect RUN... [--csv|--json|...]           print the tables of runs again
  python -m harness compare A B                                 is run B slower than run A?
  python -m harness calibrate [--world 1,2]                     measure this machine, once
  python -m harness predict RUN... [--tp 4,8] [--model NAME]    step times that nobody measured
  python -m harness doctor                                      what is installed, what can run here

experiments
{experiments}

axes (a list sweeps: tp=1,2)
{axes}

groups
{groups}

python -m harness --cfg job prints every other setting with its default; presets are files
below {conf}. --config-dir DIR adds your own;
--hydra-help lists Hydra's own flags.

python -m harness VERB --help has each verb's own flags and exit status.
"""
_NUMBERS = {
    "tp": "ranks",
    "batch": "requests at once",
    "enforce_eager": "true | false (CUDA graphs)",
    "page_size": "tokens of a K/V page",
    "model": "a group, or model.path=DIRECTORY or hub id",
    "workload": "a group, and workload.* below it",
}


def help_text(conf: Path, arguments: Sequence[str] = ()) -> str:
    """Verbs, the experiments of `conf` and of each --config-dir in `arguments`, the axes."""
    folders = [conf, *_config_dirs(arguments)]
    experiments = {
        path.stem: question(path)
        for folder in folders
        for path in sorted((folder / "experiment").glob("*.yaml"))
    }
    axes = {axis: _NUMBERS.get(axis) or " | ".join(CHOICES[axis]) for axis in AXES}
    groups = {
        group.name: " | ".join(sorted(path.stem for path in group.glob("*.yaml")))
        for group in sorted(conf.iterdir())
        if group.is_dir() and group.name != "experiment" and any(group.glob("*.yaml"))
    }
    return _TEXT.format(
        experiments=_table(experiments),
        axes=_table(axes),
        groups=_table(groups),
        conf=conf,
    ).rstrip()


def comment(path: Path) -> list[str]:
    """The lines of the comment that opens a preset, without its `@package` line and the command
    that runs it; "" parts paragraphs, and commands are indented."""
    lines: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        if not line.startswith(("# @package", "# python -m")):
            lines.append(line.removeprefix("#").removeprefix(" "))
    return lines


def question(path: Path) -> str:
    """What an experiment asks: the first paragraph of its comment, as one line."""
    return " ".join(takewhile(bool, comment(path)))


def _config_dirs(arguments: Sequence[str]) -> list[Path]:
    found = []
    for place, argument in enumerate(arguments):
        if argument.startswith("--config-dir="):
            found.append(Path(argument.split("=", 1)[1]))
        elif argument in ("--config-dir", "-cd") and place + 1 < len(arguments):
            found.append(Path(arguments[place + 1]))
    return found


def _table(rows: dict[str, str]) -> str:
    width = max(map(len, rows), default=0)
    return "\n".join(f"  {name:<{width}}  {text}" for name, text in rows.items())
