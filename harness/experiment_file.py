"""The file of an experiment, which an error in a setting is told with"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

PACKAGE = "# @package _global_"
_KEY = "experiment="


def experiment_file(overrides: Sequence[str], conf: Path, config_dir: Path | None) -> Path | None:
    """Where the experiment of a command line stands: in `conf`, which wins as in Hydra, or in
    `config_dir`; None if there is no such file, or none is asked for."""
    names = [word.split("=", 1)[1] for word in overrides if word.lstrip("+").startswith(_KEY)]
    folders = [conf] if config_dir is None else [conf, config_dir]
    files = [folder / "experiment" / f"{name}.yaml" for name in names for folder in folders]
    return next((file.resolve() for file in files if file.is_file()), None)


def remark(file: Path) -> str:
    """What is said below an error of a command line that names the experiment."""
    said = f"the experiment is {file}"
    if PACKAGE not in file.read_text(encoding="utf-8", errors="replace"):
        said += f"; its first line must be {PACKAGE}"
    return said
