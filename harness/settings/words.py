"""The words of a command line: which settings they name, and the kinds of their values"""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from harness.settings.config import BenchConfig, SettingsError, as_written

_KINDS = {int: "an integer", float: "a number", bool: "true or false", str: "a text",
          list: "a list", type(None): "null"}  # fmt: skip


class WordError(SettingsError):
    """A mistake in a word of the command line itself, whatever the files say that it names."""


IsGroup = Callable[[str], bool]
"""Whether a key chooses a preset, as `workload` and `hydra/launcher` do."""


def groups(loader: ConfigLoader, config_dir: Path | None) -> IsGroup:
    """The groups of conf/, and those of one's own, which Hydra's loader does not list."""

    @cache  # Hydra copies all it has read at each question: 10 ms, asked for each word of a point
    def is_group(key: str) -> bool:
        own = config_dir is not None and (config_dir / key).is_dir()
        return own or bool(loader.get_group_options(key))

    return is_group


def check(parsed: Sequence[Override], is_group: IsGroup, error: type[SettingsError]) -> None:
    """Looks at every `key=value` that is a setting: its name and, for each value of a sweep, its
    kind. Hydra would advise to add a key that there is not, and names classes in place of kinds.

    Raises:
        error: the first key that is no setting, or value of another kind, and what to give.
    """
    parser = OverridesParser.create()
    schema = OmegaConf.structured(BenchConfig)
    for override in parsed:
        if override.key_or_group.startswith("hydra"):
            continue
        for word in _each(override):
            one = parser.parse_override(word)
            if is_group(one.key_or_group) and not isinstance(one.value(), dict):
                continue
            for key, value in flat({one.key_or_group: one.value()}):
                kinds = _kinds(key, error)
                if one.is_delete():
                    raise error(f"~{key}: a setting cannot be taken out; give it a value, {key}=")
                try:
                    OmegaConf.update(schema, key, value)
                except OmegaConfBaseException:
                    given = "null" if value is None else as_written(value)
                    raise error(f"{key}={given}: give {kinds}{_example(key)}") from None


def flat(section: dict[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of each setting in nested dicts."""
    for key, value in section.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def quoted(text: str) -> str:
    """The text as one value of a command line, whatever it holds: a quote has a backslash before
    it, and so has each backslash that would stand before a quote."""
    escaped = re.sub(r'(\\*)(?="|$)', r"\1\1", text).replace('"', r"\"")
    return f'"{escaped}"'


def _each(override: Override) -> Iterator[str]:
    """Its words, one for each value."""
    key = override.get_key_element()
    if not override.is_sweep_override():
        yield str(override.input_line)
    elif override.is_discrete_sweep():  # the sweeper refuses others
        yield from (f"{key}={value}" for value in override.sweep_string_iterator())


def _kinds(key: str, error: type[SettingsError]) -> str:
    """What a setting takes, in words: "an integer or null"."""
    hint: Any = BenchConfig
    prefix = ""
    for part in key.split("."):
        known = [one.name for one in fields(hint)] if is_dataclass(hint) else []
        if part not in known:
            near = difflib.get_close_matches(part, known, n=1)
            raise error(
                f"{key}: no such setting" + (f"; did you mean {prefix}{near[0]}?" if near else "")
            )
        assert isinstance(hint, type)
        hint, prefix = typing.get_type_hints(hint)[part], f"{prefix}{part}."
    several = typing.get_args(hint) if typing.get_origin(hint) is not list else ()
    return " or ".join(_KINDS[typing.get_origin(one) or one] for one in several or (hint,))


def _example(key: str) -> str:
    """Its default, as one writes it."""
    value: Any = BenchConfig()
    for part in key.split("."):
        value = getattr(value, part)
    return "" if value is None else f", as in {key}={as_written(value).replace(', ', ',')}"
