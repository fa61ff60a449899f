"""A benchmark's configuration: its schema, checks across fields, and the plain dict."""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

CHOICES: dict[str, tuple[str, ...]] = {
    "compile": ("off", "layer", "model"),
    "attention": ("auto", "flash2", "flash4", "triton", "sdpa"),
    "comm": ("auto", "nccl", "gloo", "symm_mem"),
    "dtype": ("auto", "bfloat16", "float16", "float32"),
    "device": ("auto", "cpu", "cuda"),
    "model.load_format": ("auto", "dummy"),
    "workload.kind": ("decode", "prefill", "nano_vllm", "trace"),
    "timing": ("auto", "stamps", "events", "host"),
    "cache": ("cold", "warm"),
}
ENGINE_AXES = ("tp", "enforce_eager", "compile", "attention", "comm", "page_size", "dtype",
               "device")  # fmt: skip
"""Axes that are settings of the engine, under the same names."""
AXES = ("tp", "batch", "enforce_eager", "compile", "attention", "comm", "page_size", "dtype",
        "model", "workload")  # fmt: skip
"""What a point is named by."""
FIXED_BATCH = ("decode", "prefill")
"""Workloads of `batch` requests; in the others `batch` is how many run at once."""
_ARRIVALS = re.compile(r"all|trace|poisson\((?P<rate>[0-9.eE+-]+)\)")


class SettingsError(ValueError):
    """A setting that a user must change before anything can run; the text says to what."""


@dataclass
class ModelConfig:
    """Which weights."""

    name: str = "auto"  # auto (tiny on a CPU, qwen3-0.6b with GPUs), tiny, qwen3-0.6b ... qwen3-32b
    path: str | None = None  # directory or hub id in Hugging Face format; wins over name
    load_format: str = "auto"  # auto: the checkpoint; dummy: seeded noise, needs no weights


@dataclass
class WorkloadConfig:
    """What is asked of the engine."""

    kind: str = "decode"  # set by the groups of the same names
    prompt_tokens: int = 16  # of each prompt (decode, prefill)
    output_tokens: int = 32  # of each request (decode, prefill)
    num_requests: int | None = None  # the first so many (trace, nano_vllm); null: all
    trace: str | None = None  # CSV with columns TIMESTAMP, ContextTokens, GeneratedTokens
    arrivals: str = "all"  # all (at once), trace (the file's times), poisson(RATE), RATE in 1/s
    temperature: float = 0.0  # 0 is greedy
    seed: int = 0  # of prompts, arrivals and sampling
    max_tokens_cap: int | None = None  # most output tokens of a request (trace, nano_vllm)
    prompt_cap: int | None = None  # most prompt tokens of a request (trace, nano_vllm)


@dataclass
class EngineSection:
    """Settings of the engine that are no axes."""

    max_model_len: int | None = None  # tokens of prompt + output; null: what the model takes
    max_num_seqs: int | None = None  # requests in the cache at once; null: the largest batch
    max_num_batched_tokens: int | None = None  # query tokens of a step; null: the engine's default
    num_pages: int | None = None  # pages of the K/V cache; null: from free memory
    prefix_cache: bool = False  # reuse K/V of equal prefixes; off: repeats do equal work
    memory_utilization: float = 0.9  # share of a GPU's memory for weights and cache
    threads_per_rank: int | None = None  # intra-op threads of a CPU rank; null: cores // tp
    seed: int = 0  # of dummy weights


@dataclass
class MeasureConfig:
    """How often a point is repeated, and how long it may take."""

    name: str = "quick"  # set by the groups of the same names
    warmup: int = 1  # runs of the whole workload before the first that counts
    min_repeats: int = 3  # measured runs at least
    max_repeats: int = 10  # measured runs at most
    rel_noise: float = 0.05  # stop when std / median of the repeats' tok/s is this small
    wall_limit_s: float = 10.0  # seconds after which no further repeat begins
    n_process: int = 1  # fresh engines that measure the same point
    point_timeout_s: float = 600.0  # seconds after which a point ends as timeout
    startup_timeout_s: float = 900.0  # seconds that an engine may take to start
    backlog_us: float = 20_000.0  # backlog pass: the GPU spins so long before each step, so that
    # the host runs ahead of it; doubled where it was too short
    skew_rank: int = 1  # skew pass: whose all-reduces are delayed
    skew_us: list[float] = field(  # skew pass: the delays; decode steps take turns through them
        default_factory=lambda: [0.0, 50.0, 250.0, 1000.0]
    )
    backlog_layers: int | None = None  # decoder layers behind one spin; null: 8 eager, 24 compiled


@dataclass
class InstrumentConfig:
    """What the instrumented pass attaches; the plain pass has nothing attached."""

    collectives: bool = False  # a row for every collective on every rank
    nvtx: bool = False  # NVTX ranges for a profiler
    counts: bool = False  # collectives counted by kind and site, compared with the expected number
    skew: bool = False  # a pass in which one rank is delayed before each all-reduce (tp above 1)
    profiler: bool = False  # a pass with torch.profiler over 12 decode steps (GPU, tp above 1)
    nsys: bool = False  # a pass for nsys; `python -m harness profile` sets it


@dataclass
class BenchConfig:
    """One point before planning. A key that is not here is an error wherever it is written.

    The comment behind a field, here and above, is its description in docs/config.md."""

    experiment: str | None = None  # set by +experiment=NAME; part of the run folder's name
    tp: int = 1  # ranks of the tensor-parallel group
    batch: int = 1  # requests at once
    enforce_eager: bool = True  # false: decode steps replay CUDA graphs
    compile: str = "off"  # layer: each decoder layer a region; model: embedding to final norm one
    attention: str = "auto"  # auto: the fastest that runs here
    comm: str = "auto"  # auto: nccl on GPUs, gloo on CPUs
    page_size: int | None = None  # tokens of one K/V page; null: what the attention backend likes
    dtype: str = "auto"  # auto: the checkpoint's
    device: str = "auto"  # auto: cuda where a GPU is visible
    model: ModelConfig = field(default_factory=ModelConfig)
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    engine: EngineSection = field(default_factory=EngineSection)
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    instrument: InstrumentConfig = field(default_factory=InstrumentConfig)
    timing: str = "auto"  # what times a collective: stamps (timestamp kernels) or events on a GPU,
    # the host's clock on a CPU; auto: stamps or host. Events in a graph disturb what they measure
    cache: str = "cold"  # compile caches: cold (a fresh folder per engine), warm (kept)
    fail_fast: bool = False  # true: stop after the first point that fails
    resume: str = "auto"  # auto (newest unfinished run of the same plan), never, or a run folder
    results_dir: str = "results/runs"  # run folders are made here


def as_written(value: Any) -> str:
    """A value as a command line has it: true, not True."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def register() -> None:
    """Makes the schema known to Hydra as `schema`, which conf/config.yaml names first."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name="schema", node=BenchConfig)


def to_plain(config: Any) -> dict[str, Any]:
    """A composed DictConfig (without Hydra's part) -> nested dict; `instrument` becomes the list of
    what is switched on.

    Raises:
        SettingsError: a key that the schema does not have (Hydra lets `+key=value` add one).
    """
    from omegaconf import OmegaConf

    plain = OmegaConf.to_container(config, resolve=True, enum_to_str=True)
    assert isinstance(plain, dict)
    cfg: dict[str, Any] = {str(key): value for key, value in plain.items()}
    _refuse_unknown(cfg, asdict(BenchConfig()), "")
    cfg["instrument"] = [name for name, on in cfg["instrument"].items() if on]
    return cfg


def _refuse_unknown(cfg: dict[str, Any], known: dict[str, Any], prefix: str) -> None:
    for key, value in cfg.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {prefix}{near[0]}?" if near else ""
            raise SettingsError(f"{prefix}{key}: no such setting{hint}")
        if isinstance(known[key], dict):
            _refuse_unknown(value, known[key], f"{prefix}{key}.")


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
        0: ("workload.temperature", "workload.seed", "engine.seed"),
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


def _workload(cfg: dict[str, Any]) -> None:
    work = cfg["workload"]
    kind, arrivals = work["kind"], work["arrivals"]
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
