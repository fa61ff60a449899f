"""The list of points, decided before any runs: what each needs, skips, and the order."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.machine.capabilities import Machine, skip_reason
from harness.machine.fingerprint import digest, file_digest
from harness.settings.config import AXES, ENGINE_AXES, FIXED_BATCH, SettingsError
from harness.settings.skip_rules import skip_rule
from harness.settings.validation import validate
from harness.tables.scaling import OF_RANKS

if TYPE_CHECKING:
    from engine.shape import ModelShape

ENGINE_FIELDS = ("backend", *ENGINE_AXES, "model", "engine", "cache")
"""What an engine is started with. Two points that agree in these share a live engine."""
CODE_FIELDS = ("backend", "tp", "compile", "attention", "comm", "page_size", "dtype", "device",
               "model")  # fmt: skip
"""What compiled code may depend on: engines that agree in these share a kept compile cache, so that
eager and captured forms, or other numbers of pages, find each other's code. What another
engine.max_model_len or max_num_seqs left there is not taken: its tables have other sizes."""
MEASURE_FIELDS = ("batch", "workload", "measure", "instrument", "timing")


@dataclass(frozen=True)
class Point:
    """One row of the plan.

    Attributes:
        point_id: 12 hex digits; hash of everything that a result depends on.
        index: place in the order of running, from 0.
        engine_key: 12 hex digits; hash of everything that needs a fresh engine.
        axes: the values that name the point, one for each name of `config.AXES`.
        cfg: the resolved configuration as a plain dict.
        skip: why it cannot run on this machine, or None.
    """

    point_id: str
    index: int
    engine_key: str
    axes: dict[str, Any]
    cfg: dict[str, Any]
    skip: str | None = None


@dataclass(frozen=True)
class Plan:
    """Points in the order of running. `key` hashes their ids and skip reasons: with an equal key, a
    point that an earlier run has measured need not be measured again."""

    experiment: str
    key: str
    points: tuple[Point, ...]
    surroundings: dict[str, Any]

    @property
    def engine_starts(self) -> int:
        """Fresh engines (measure.n_process) of the points that are not skipped."""
        starts: dict[str, int] = {}
        for point in (point for point in self.points if point.skip is None):
            asked = int(point.cfg["measure"]["n_process"])
            starts[point.engine_key] = max(asked, starts.get(point.engine_key, 0))
        return sum(starts.values())

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Model:
    """A model as the planner needs it: shape for the limits, identity for the keys."""

    shape: ModelShape
    identity: dict[str, Any]


def load_model(model: dict[str, Any]) -> Model:
    """Finds (or builds) the model of a resolved `model` section and reads its config.json."""
    from engine.shape import ModelShape
    from harness.machine.fingerprint import checkpoint
    from harness.machine.models import resolve_model

    folder = Path(resolve_model(model))
    return Model(ModelShape.from_hf(folder), checkpoint(folder))


def resolve(cfg: dict[str, Any], machine: Machine) -> dict[str, Any]:
    """A copy in which `auto` of device, timing and model became what it is on this machine.

    A published size without a path has dummy weights: nobody said where real ones are.
    """
    cfg = copy.deepcopy(cfg)
    if cfg["device"] == "auto":
        cfg["device"] = machine.device
    if machine.processes and cfg["backend"] == "native":
        cfg["engine"]["ranks"] = "torchrun"  # no setting: how the harness was started decides it
    if cfg["timing"] == "auto":
        cfg["timing"] = "stamps" if cfg["device"] == "cuda" else "host"
    model = cfg["model"]
    if model["path"] is not None:
        local = Path(model["path"]).expanduser()
        model["name"] = local.name
        model["path"] = str(local.resolve()) if local.is_dir() else model["path"]
    elif model["name"] == "auto":
        model["name"] = "qwen3-0.6b" if cfg["device"] == "cuda" else "tiny"
    if model["path"] is None and model["name"] != "tiny" and model["load_format"] == "auto":
        model["load_format"] = "dummy"
    if cfg["workload"]["trace"] is not None:
        cfg["workload"]["trace"] = str(Path(cfg["workload"]["trace"]).expanduser().resolve())
    return cfg


def build(
    configs: Sequence[dict[str, Any]],
    *,
    machine: Machine,
    surroundings: dict[str, Any],
    load_model: Callable[[dict[str, Any]], Model] = load_model,
) -> Plan:
    """Composed configurations in the order of the axes -> the plan.

    Args:
        configs: plain dicts of `config.to_plain`.
        surroundings: `fingerprint.surroundings()`; part of every key.
        load_model: a resolved `model` section -> its shape and identity.

    Raises:
        SettingsError, ConfigError: a setting that no machine could run, unless a skip rule leaves
            it out; a skip rule that is none. Nothing has started then.
        TraceError: a trace that cannot be read.
    """
    for cfg in configs:
        validate(cfg)
    resolved = [resolve(cfg, machine) for cfg in configs]
    left_out = [skip_rule(cfg) for cfg in resolved]
    models: dict[str, Model] = {}
    for cfg, rule in zip(resolved, left_out, strict=True):
        key = digest(cfg["model"])
        if key not in models:
            models[key] = load_model(cfg["model"])
        if rule is None:
            check_limits(cfg, models[key].shape)
    _check_traces(resolved)
    fill_max_num_seqs(resolved, left_out)

    points: dict[str, Point] = {}
    for cfg, rule in zip(resolved, left_out, strict=True):
        model = models[digest(cfg["model"])]
        identity, shape = model.identity, model.shape
        skip = rule or skip_reason(cfg, machine, shape)
        engine_key = digest([_part(cfg, ENGINE_FIELDS), identity])
        point_id = digest(
            [engine_key, _part(cfg, MEASURE_FIELDS), _trace_identity(cfg), surroundings]
        )
        points.setdefault(
            point_id,
            Point(point_id, -1, engine_key, axes_of(cfg), cfg, skip),
        )
    ordered = tuple(
        replace(point, index=index) for index, point in enumerate(_by_engine(points.values()))
    )
    experiment = str(resolved[0]["experiment"] or "adhoc") if resolved else "adhoc"
    key = digest([experiment, [(point.point_id, point.skip) for point in ordered]])
    return Plan(experiment, key, ordered, surroundings)


def check_limits(cfg: dict[str, Any], shape: ModelShape) -> None:
    """What the model asks of a configuration.

    Raises:
        ConfigError: a TP size that its heads cannot be divided by.
        SettingsError: requests longer than the model takes.
    """
    shape.check_tp(cfg["tp"])
    limit = cfg["engine"]["max_model_len"]
    name = "engine.max_model_len"
    if limit is None:
        limit, name = shape.longest_by_default, f"the limit of model {cfg['model']['name']}"
    elif limit > shape.longest:
        raise SettingsError(
            f"engine.max_model_len={limit}: model {cfg['model']['name']} takes at most "
            f"{shape.longest} tokens"
        )
    work = cfg["workload"]
    longest = {
        "decode": work["prompt_tokens"] + work["output_tokens"],
        "prefill": work["prompt_tokens"] + work["output_tokens"],
    }.get(work["kind"], 0)
    if longest > limit:
        raise SettingsError(
            f"workload.prompt_tokens={work['prompt_tokens']} and "
            f"workload.output_tokens={work['output_tokens']}: {longest} tokens a request, "
            f"above {name}, {limit}; shorten them"
        )


def _check_traces(configs: Sequence[dict[str, Any]]) -> None:
    """Reads every trace once as its points will."""
    from harness.measuring.workload import traced

    works = [cfg["workload"] for cfg in configs if cfg["workload"]["kind"] == "trace"]
    for work in {(work["trace"], work["num_requests"]): work for work in works}.values():
        traced(work)


def axes_of(cfg: dict[str, Any]) -> dict[str, Any]:
    """The values that name a point; a group is named by its name."""
    names = {"model": cfg["model"]["name"], "workload": cfg["workload"]["kind"]}
    return {axis: names.get(axis, cfg[axis]) for axis in AXES}


def code_key(cfg: dict[str, Any]) -> str:
    """12 hex digits; names the compile cache of cache=warm."""
    return digest(_part(cfg, CODE_FIELDS))


def _part(cfg: dict[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    return {name: cfg[name] for name in fields}


def fill_max_num_seqs(configs: Sequence[dict[str, Any]], left_out: Sequence[str | None]) -> None:
    """null becomes the largest batch among the points that could share an engine but for the number
    of its ranks, those that a rule leaves out not counted. So a rule of one TP size gives no other
    limit to it than to the TP sizes that it is divided by.

    Where `batch` is how many requests run at once (a trace), it is the engine's own limit, and a
    larger one would change what is measured: such a point keeps its own batch.
    """
    fields = [name for name in ENGINE_FIELDS if name not in OF_RANKS]
    largest: dict[str, int] = {}
    open_ones = [
        (cfg, digest(_part(cfg, fields)), rule)
        for cfg, rule in zip(configs, left_out, strict=True)
        if cfg["engine"]["max_num_seqs"] is None
    ]
    for cfg, key, rule in open_ones:
        if cfg["workload"]["kind"] in FIXED_BATCH and rule is None:
            largest[key] = max(largest.get(key, 0), cfg["batch"])
    for cfg, key, _ in open_ones:
        fixed = cfg["workload"]["kind"] in FIXED_BATCH
        cfg["engine"]["max_num_seqs"] = largest.get(key, cfg["batch"]) if fixed else cfg["batch"]


def _trace_identity(cfg: dict[str, Any]) -> str | None:
    trace = cfg["workload"]["trace"]
    return file_digest(Path(trace)) if trace else None


def _by_engine(points: Any) -> list[Point]:
    """Points grouped by engine; groups, and points within one, in the order of first appearance.
    Skipped ones come last in their group, whose engine then measures without a break."""
    groups: dict[str, list[Point]] = {}
    for point in points:
        groups.setdefault(point.engine_key, []).append(point)
    return [p for group in groups.values() for p in sorted(group, key=lambda p: p.skip is not None)]
