"""Axes of a sweep: an experiment's, where the command line gives some of them too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf.errors import InterpolationResolutionError

from harness.settings.config import SettingsError


def axes(params: Any, given: Mapping[str, Override]) -> list[str]:
    """The experiment's axes, each in its place; of one that the command line gives the value there,
    so that the file's own, which this machine may not be able to say, is not asked for."""
    try:
        return [str(given[k].input_line) if k in given else f"{k}={params[k]}" for k in params]
    except InterpolationResolutionError as error:
        cause = error.__context__  # OmegaConf's own of the resolver's, one inside the other
        while cause is not None and not isinstance(cause, SettingsError):
            cause = cause.__context__
        raise (cause or error) from None


def refuse_device_axis(given: Override | None, params: Any, launcher: str) -> None:
    if "device" in params or (given is not None and given.is_sweep_override()):
        raise SettingsError(
            f"device as an axis with hydra/launcher={launcher}: all jobs are given the same, and "
            "an experiment's sizes follow the device; give device=cuda or device=cpu"
        )


def refuse_empty(overrides: Sequence[Override]) -> None:
    """Raises:
    SettingsError: an axis without a value, which has no point to run.
    """
    for one in overrides:
        if one.is_discrete_sweep() and not list(one.sweep_string_iterator()):
            key = one.get_key_element()
            raise SettingsError(
                f"{one.input_line}: an axis without a value; give one at least, as in {key}=A,B"
            )
