"""The file of an experiment, and whether an error is of what stands in it"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import yaml
from hydra.errors import MissingConfigException, OverrideParseException

from harness.settings.config import SettingsError
from harness.settings.words import WordError, flat

PACKAGE = "# @package _global_"
UNREADABLE = (yaml.YAMLError, UnicodeDecodeError)
"""What a file raises that holds no YAML, or no UTF-8."""
_KEY = "experiment="
_NAMED = (r"^([A-Za-z_][\w.]*)", r"full_key: (\S+)")
"""How an error of ours, and one of OmegaConf, names the setting."""


def experiment_file(overrides: Sequence[str], conf: Path, config_dir: Path | None) -> Path | None:
    """Where the experiment of a command line stands: in `conf`, which wins as in Hydra, or in
    `config_dir`; None if there is no such file, or none is asked for."""
    names = [word.split("=", 1)[1] for word in overrides if word.lstrip("+").startswith(_KEY)]
    folders = [conf] if config_dir is None else [conf, config_dir]
    files = [folder / "experiment" / f"{name}.yaml" for name in names for folder in folders]
    return next((file.resolve() for file in files if file.is_file()), None)


def is_at_fault(error: Exception, file: Path, overrides: Sequence[str]) -> bool:
    """Whether `error` is of what the experiment's file says, not of the command line beside it."""
    text = str(error)
    if isinstance(error, WordError):
        return False
    if isinstance(error, UnicodeDecodeError):
        return True  # arguments are decoded long since
    if isinstance(error, OverrideParseException):
        return error.override not in overrides
    if isinstance(error, MissingConfigException):
        asked = [word.lstrip("+").replace("=", "/", 1) for word in overrides]
        return error.missing_cfg_file not in asked
    if f"'experiment/{file.stem}'" in text or str(file) in text:
        return True
    found = re.search(_NAMED[0] if isinstance(error, SettingsError) else _NAMED[1], text)
    if found is None or found[1] in [word.lstrip("+").partition("=")[0] for word in overrides]:
        return False
    return any(f"{found[1]}.".startswith(f"{key}.") for key in _keys(file))


def _keys(file: Path) -> set[str]:
    """The settings and axes that a file names."""
    read = yaml.safe_load(file.read_text(encoding="utf-8"))
    keys = {key for key, _ in flat(read if isinstance(read, dict) else {})}
    return keys | {key.removeprefix("hydra.sweeper.params.") for key in keys}


def remark(file: Path) -> str:
    """What is said below an error of a command line that names the experiment."""
    said = f"the experiment is {file}"
    if PACKAGE not in file.read_text(encoding="utf-8", errors="replace"):
        said += f"; its first line must be {PACKAGE}"
    return said
