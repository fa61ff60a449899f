"""Presets that a command line chooses, which win over the experiment that it names

Hydra reads the file of an experiment last, and its axes as if they had been typed: both would set
anew what `workload=prefill` has set.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from harness.settings.config import IDLE, LENGTHS, SHAPE, BenchConfig, WorkloadConfig
from harness.settings.words import IsGroup, flat

WHOLE = ("model", "instrument")
"""Groups whose presets are all of their section: model=tiny is not at another model's path."""


class Presets:
    """The presets of a command line.

    Args:
        words: the command line as Hydra gets it.
        task: the same parsed, without Hydra's own settings.
        base: the configuration of the command line; its choices are in the order of reading, the
            last one first.
    """

    def __init__(
        self,
        loader: ConfigLoader,
        is_group: IsGroup,
        words: Sequence[str],
        task: Sequence[Override],
        base: DictConfig,
    ) -> None:
        self._loader = loader
        self._is_group = is_group
        self._parser = OverridesParser.create(config_loader=loader)
        self._searchpath = [word for word in words if word.startswith("hydra.searchpath=")]
        self.typed = list(task)
        self._given = {override.key_or_group for override in task}
        self._order = list(base.hydra.runtime.choices)[::-1]
        self._read: dict[str, dict[str, Any]] = {}

    def over_experiment(self, job: Sequence[str]) -> list[str]:
        """The words of one point, and those that its presets stand for; without axes of the
        experiment for the same keys. A key that is given by itself is left alone.

        Without an experiment, nothing comes after the presets."""
        if "experiment" not in self._given:
            return list(job)
        typed = [word for word in job if _key(word) in self._given]
        found = self._settings(typed)
        without = {*found, *(LENGTHS if SHAPE in self._given else ())}
        kept = [word for word in job if word in typed or _key(word) not in without]
        further = [key for key in found if SHAPE not in self._given or key not in LENGTHS]
        return kept + [f"{key}={_written(found[key])}" for key in further]

    def further(self) -> list[str]:
        """Words that a command line without a sweep lacks."""
        typed = [str(override.input_line) for override in self.typed]
        return self.over_experiment(typed)[len(typed) :]

    def _settings(self, typed: Iterable[str]) -> dict[str, Any]:
        """{dotted key: value} of the presets among `typed`, and what goes with the keys."""
        chosen = [self._parser.parse_override(word) for word in typed]
        chosen = [one for one in chosen if self._is_preset(one)]
        chosen.sort(key=lambda one: self._rank(one.key_or_group))
        found: dict[str, Any] = {}
        for one in chosen:
            found |= self._preset(f"+{one.key_or_group}={one.get_value_element_as_str()}")
        for group in {one.key_or_group for one in chosen}.intersection(WHOLE):
            section = asdict(BenchConfig())[group]
            found = dict(flat({group: section})) | found
        kind = str(found.get("workload.kind"))
        for key in IDLE.get(kind, ()):  # the experiment's, of another kind
            found.setdefault(f"workload.{key}", getattr(WorkloadConfig(), key))
        if any(key in found for key in LENGTHS):
            found[SHAPE] = None
        return {key: value for key, value in found.items() if key not in self._given}

    def _is_preset(self, one: Override) -> bool:
        key = one.key_or_group
        if key == "experiment" or key.startswith("hydra") or one.is_delete():
            return False
        return isinstance(one.value(), str | list) and self._is_group(key)

    def _rank(self, group: str) -> int:
        """Its place in the order in which Hydra reads the groups; one of which several presets are
        chosen is not among the choices."""
        return self._order.index(group) if group in self._order else -1

    def _preset(self, word: str) -> dict[str, Any]:
        if word not in self._read:
            words = [*self._searchpath, word]
            loaded = self._loader.load_configuration(None, words, RunMode.RUN)
            plain = OmegaConf.to_container(loaded, resolve=False)
            assert isinstance(plain, dict)
            self._read[word] = dict(flat({k: v for k, v in plain.items() if k != "hydra"}))
        return self._read[word]


def _key(word: str) -> str:
    return word.partition("=")[0].lstrip("+~")


def _written(value: Any) -> str:
    """In Hydra's grammar; a text in quotes, within which `${...}` stays what it is."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_written(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_written, value)) + "]"
    if isinstance(value, str):
        return QuotedString(text=value, quote=Quote.double).with_quotes()
    return "null" if value is None else str(value).lower()
