"""A configuration checked: ranges, choices, and what one setting asks of another"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from harness.settings.config import CHOICES, FIXED_BATCH, IDLE, SettingsError, WorkloadConfig

_ARRIVALS = re.compile(r"all|trace|poisson\((?P<rate>[0-9.eE+-]+)\)")
LONGEST_SKEW_US = 100_000.0
"""Of one delay; a step has as many as all-reduces, a hundred or so."""


def arrival_rate(arrivals: str) -> float | None:
    """poisson(RATE) -> RATE in requests per second; None for `all` and `trace`.

    Raises:
        SettingsError: neither form, or a rate that is not positive.
    """
    match = _ARRIVALS.fullmatch(arrivals)
    try:
        rate = float(match["rate"]) if match and match["rate"] else None
    except ValueError:
        match = None
    if match is None or (rate is not None and not 0 < rate < float("inf")):
        raise SettingsError(
            f"workload.arrivals={arrivals}: give all, trace or poisson(RATE), RATE in requests per "
            "second and above 0"
        )
    return rate


def validate(cfg: dict[str, Any]) -> None:
    """Checks ranges, choices and what one field asks of another, on the plain dict.

    Raises:
        SettingsError: the first setting that cannot stand, its limit, and what to write instead.
    """
    for name, allowed in CHOICES.items():
        _choice(name, _get(cfg, name), allowed)
    _finite(cfg, "")
    _ranges(cfg)
    if not cfg["results_dir"]:  # a variable of the shell that is not set
        raise SettingsError("results_dir=: give a folder, as in results_dir=results/runs")
    _workload(cfg)
    if cfg["measure"]["max_repeats"] < cfg["measure"]["min_repeats"]:
        raise SettingsError(
            f"measure.max_repeats={cfg['measure']['max_repeats']}: must be at least "
            f"measure.min_repeats={cfg['measure']['min_repeats']}"
        )
    if {"profiler", "nsys"} <= set(cfg["instrument"]):
        raise SettingsError(
            "instrument.profiler=true: torch.profiler and nsys cannot both read CUPTI; leave it out"
        )
    if "nsys" in cfg["instrument"] and cfg["backend"] != "native":
        raise SettingsError(
            f"backend={cfg['backend']}: profile reads the ranges of the native engine; leave it out"
        )
    if "skew" in cfg["instrument"]:
        _skew(cfg)
    seqs, batch = cfg["engine"]["max_num_seqs"], cfg["batch"]
    if seqs is not None and seqs < batch:
        raise SettingsError(
            f"engine.max_num_seqs={seqs}: batch={batch} needs at least {batch}; leave it null to "
            "have it follow the batches"
        )
    tokens = cfg["engine"]["max_num_batched_tokens"]
    if tokens is not None and tokens < max(batch, seqs or 0):
        raise SettingsError(
            f"engine.max_num_batched_tokens={tokens}: a decode step of {max(batch, seqs or 0)} "
            "requests has as many tokens; give at least that"
        )


def _get(cfg: dict[str, Any], dotted: str) -> Any:
    value: Any = cfg
    for part in dotted.split("."):
        value = value[part]
    return value


def _choice(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value in allowed:
        return
    was_off = value == "False" and "off" in allowed  # YAML 1.1 reads a bare off as false
    hint = ' (in a YAML file write "off" in quotes)' if was_off else ""
    raise SettingsError(f"{name}={value}: choose one of {', '.join(allowed)}{hint}")


def _finite(cfg: dict[str, Any], prefix: str) -> None:
    for name, value in cfg.items():
        if isinstance(value, dict):
            _finite(value, f"{prefix}{name}.")
        elif isinstance(value, float) and not math.isfinite(value):
            raise SettingsError(f"{prefix}{name}={value}: give a finite number")


def _ranges(cfg: dict[str, Any]) -> None:
    at_least = {
        1: ("tp", "batch", "page_size", "workload.prompt_tokens", "workload.output_tokens",
            "workload.num_requests", "workload.max_tokens_cap", "workload.prompt_cap",
            "engine.max_model_len", "engine.max_num_seqs", "engine.max_num_batched_tokens",
            "engine.num_pages", "engine.threads_per_rank", "measure.min_repeats",
            "measure.n_process", "measure.backlog_layers", "measure.warmup"),
        0: ("workload.temperature", "workload.seed", "engine.seed", "engine.graph_prompt_tokens"),
    }  # fmt: skip
    for limit, names in at_least.items():
        for name in names:
            value = _get(cfg, name)
            if value is not None and not value >= limit:
                raise SettingsError(f"{name}={value}: give at least {limit}")
    for name in ("rel_noise", "wall_limit_s", "point_timeout_s", "startup_timeout_s", "backlog_us"):
        value = cfg["measure"][name]
        if not value > 0:
            raise SettingsError(f"measure.{name}={value}: give a value above 0")
    used = cfg["engine"]["memory_utilization"]
    if not 0 < used <= 1:
        raise SettingsError(f"engine.memory_utilization={used}: give a value in (0, 1]")


def _skew(cfg: dict[str, Any]) -> None:
    rank, delays, tp = cfg["measure"]["skew_rank"], cfg["measure"]["skew_us"], cfg["tp"]
    if tp > 1 and not 0 <= rank < tp:
        raise SettingsError(f"measure.skew_rank={rank}: tp={tp} has ranks 0 to {tp - 1}")
    if not delays or not all(0 <= us <= LONGEST_SKEW_US for us in delays):
        raise SettingsError(
            f"measure.skew_us={delays}: give delays from 0 to {LONGEST_SKEW_US:.0f} us"
        )


def _refuse_idle(work: dict[str, Any]) -> None:
    """A setting that the kind of workload does not read would look like one that was measured."""
    kind = work["kind"]
    for key in IDLE[kind]:
        if work[key] == getattr(WorkloadConfig(), key):
            continue
        why = {
            "num_requests": f"workload={kind} serves `batch` requests",
            "trace": f"workload={kind} reads no file",
        }.get(key, f"all requests of workload={kind} are of the same lengths")
        if kind not in FIXED_BATCH and key != "trace":
            why = f"the requests of workload={kind} have lengths of their own"
        others = " and ".join(other for other in IDLE if key not in IDLE[other])
        raise SettingsError(f"workload.{key}={work[key]}: {why}; it is of {others}; leave it out")


def _workload(cfg: dict[str, Any]) -> None:
    work = cfg["workload"]
    kind, arrivals = work["kind"], work["arrivals"]
    _refuse_idle(work)
    arrival_rate(arrivals)
    if kind in FIXED_BATCH and arrivals != "all":
        raise SettingsError(
            f"workload.arrivals={arrivals}: {kind} sends its whole batch at once; use "
            "workload=trace or workload=nano_vllm for arrivals over time"
        )
    if arrivals == "trace" and kind != "trace":
        raise SettingsError(
            f"workload.arrivals=trace: {kind} has no arrival times; use workload=trace"
        )
    if kind != "trace":
        return
    if work["trace"] is None:
        raise SettingsError(
            "workload.trace=null: workload=trace needs workload.trace=<CSV of the Azure format>"
        )
    if not Path(work["trace"]).expanduser().is_file():
        raise SettingsError(f"workload.trace={work['trace']}: no such file")
