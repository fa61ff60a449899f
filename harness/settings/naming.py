"""A configuration's settings by their dotted names, and which of them tell points apart"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from typing import Any

from harness.settings.config import AXES, BenchConfig, as_written

OF_THE_RUN = ("experiment", "results_dir", "resume", "fail_fast", "skip", "device_lock")
"""Settings of a run, not of what is measured."""
SHORT = {"model.name": "model", "workload.kind": "workload", "measure.name": "measure"}
"""Names of groups stand for them, as in the table of points."""


def settings(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Every setting of a configuration (a plain dict) that says what is measured, by its name.
    A list is one text, an empty one "none"."""
    flat: dict[str, Any] = {}
    for name, value in cfg.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{key}": inner for key, inner in value.items()}
        elif name not in OF_THE_RUN:
            flat[name] = value
    flat |= {n: ",".join(map(str, v)) or "none" for n, v in flat.items() if isinstance(v, list)}
    return {SHORT.get(name, name): value for name, value in flat.items()}


def varying(asked: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of the settings whose value is not equal in all: AXES first, then the others."""
    names = dict.fromkeys([*AXES, *(name for one in asked for name in one)])
    return [name for name in names if len({repr(one.get(name)) for one in asked}) > 1]


@cache
def defaults() -> Mapping[str, Any]:
    """The settings of a command line that gives none, before a machine has its say in `auto`."""
    return settings({**asdict(BenchConfig()), "instrument": ["collectives", "nvtx", "counts"]})


def changed(asked: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of the settings besides AXES that are equal in all and differ from their default. An
    engine.max_num_seqs of the largest batch is what null became (harness/planning/plan.py)."""
    first, default = asked[0] if asked else {}, {**defaults()}
    largest = max((one["batch"] for one in asked if "batch" in one), default=None)
    if first.get("engine.max_num_seqs") == largest:
        default["engine.max_num_seqs"] = largest
    same = {name for name in first if len({repr(one.get(name)) for one in asked}) == 1}
    return [
        name
        for name, value in first.items()
        if name in same and name not in AXES and value != default.get(name)
    ]


def named(asked: Mapping[str, Any], names: Iterable[str]) -> str:
    """A point as a command line would name it."""
    return " ".join(f"{name}={as_written(asked.get(name))}" for name in names)
