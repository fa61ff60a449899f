"""A benchmark's configuration: its schema, checks across fields, and the plain dict."""

from __future__ import annotations

import difflib
from dataclasses import asdict, dataclass, field
from typing import Any

CHOICES: dict[str, tuple[str, ...]] = {
    "backend": ("native", "transformers", "nanovllm", "vllm"),
    "compile": ("off", "layer", "model"),
    "attention": ("auto", "flash2", "flash2_triton", "flash4", "triton", "sdpa"),
    "comm": ("auto", "nccl", "gloo", "symm_mem", "symm_fused"),
    "dtype": ("auto", "bfloat16", "float16", "float32"),
    "device": ("auto", "cpu", "cuda"),
    "model.load_format": ("auto", "dummy"),
    "engine.fused": ("auto", "none", "layers", "store"),
    "engine.linear": ("auto", "torch", "triton"),
    "workload.kind": ("decode", "prefill", "nano_vllm", "trace"),
    "timing": ("auto", "stamps", "events", "host"),
    "cache": ("cold", "warm"),
    "device_lock": ("wait", "refuse", "off"),
}
ENGINE_AXES = ("tp", "enforce_eager", "compile", "attention", "comm", "page_size", "dtype",
               "device")  # fmt: skip
"""Axes that are settings of the engine, under the same names."""
AXES = ("backend", "tp", "batch", "enforce_eager", "compile", "attention", "comm", "page_size",
        "dtype", "model", "workload")  # fmt: skip
"""What a point is named by."""
FIXED_BATCH = ("decode", "prefill")
"""Workloads of `batch` requests; in the others `batch` is how many run at once."""
LENGTHS = ("workload.prompt_tokens", "workload.output_tokens")
SHAPE = "workload.shape"
"""Both of LENGTHS at once."""
_CHOSEN = ("num_requests", "trace", "max_tokens_cap", "prompt_cap")
IDLE: dict[str, tuple[str, ...]] = {
    "decode": _CHOSEN,
    "prefill": _CHOSEN,
    "nano_vllm": ("prompt_tokens", "output_tokens", "trace"),
    "trace": ("prompt_tokens", "output_tokens"),
}
"""What each kind of workload does not read, of the section `workload`."""


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
    shape: str | None = None  # PROMPT/OUTPUT, as 128/512: both lengths at once, in the place of the
    # two above, so that a sweep can link them (shape=128/128,2048/512)
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
    graph_prompt_tokens: int | None = None  # rows of the largest step with prompts that replays a
    # CUDA graph, 0: none does; null: as many as the GPU computes while the host launches them
    num_pages: int | None = None  # pages of the K/V cache; null: from free memory
    overlap: bool | None = None  # plan a step while the one before it runs; null: on GPUs
    fused: str = "auto"  # own kernels on a GPU where nothing is compiled. none: torch's own ops;
    # layers: norms, rotation, activation; store: K and V are written with the rotation too;
    # auto: store on GPUs, none on CPUs
    linear: str = "auto"  # the layers' products. torch: cuBLAS; triton: those of few rows by own
    # kernels where these are faster; auto: triton on GPUs, torch on CPUs
    prefix_cache: bool = False  # reuse K/V of equal prefixes; off: repeats do equal work
    memory_utilization: float = 0.9  # share of a GPU's memory for weights and cache
    threads_per_rank: int | None = None  # intra-op threads of a CPU rank; null: cores // tp
    seed: int = 0  # of dummy weights


def _skew_us() -> list[float]:
    return [0.0, 50.0, 250.0, 1000.0]


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
    skew_us: list[float] = field(default_factory=_skew_us)  # skew pass: the delays; decode steps
    # take turns through them
    backlog_layers: int | None = None  # decoder layers behind one spin; null: 8 eager, 24 compiled


@dataclass
class InstrumentConfig:
    """What the instrumented pass attaches; the plain pass has nothing attached."""

    collectives: bool = False  # a row for every collective on every rank
    nvtx: bool = False  # NVTX ranges for a profiler
    counts: bool = False  # collectives counted by kind and site, compared with the expected number
    skew: bool = False  # a pass in which one rank is delayed before each all-reduce (tp above 1)
    profiler: bool = False  # a pass with torch.profiler over 12 decode steps (GPU)
    nsys: bool = False  # a pass for nsys; `python -m harness profile` sets it


@dataclass
class BenchConfig:
    """One point before planning. A key that is not here is an error wherever it is written.

    The comment behind a field, here and above, is its description in docs/config.md."""

    experiment: str | None = None  # set by +experiment=NAME; part of the run folder's name
    backend: str = "native"  # the engine measured: this repository's, or one of others
    tp: int = 1  # ranks of the tensor-parallel group
    batch: int = 1  # requests at once
    enforce_eager: bool = True  # false: steps replay CUDA graphs, those with prompts up to
    # engine.graph_prompt_tokens rows
    compile: str = "off"  # layer: each decoder layer a region; model: embedding to final norm one
    attention: str = "auto"  # auto: the fastest that runs here
    comm: str = "auto"  # symm_mem: all-reduces over memory that the GPUs share; symm_fused: a sum,
    # the residual's addition and the norm behind it are one kernel too (in compiled code as
    # symm_mem); auto: symm_fused where GPUs reach each other's memory, else nccl; gloo on CPUs
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
    skip: list[Any] = field(default_factory=list)  # rules {when: {SETTING: VALUE}, reason: TEXT}:
    # points that meet all of one are skipped rows with its reason; a value may be a list or a
    # comparison such as ">=8" or "!=off"
    fail_fast: bool = False  # true: stop after the first point that fails; the others stay pending
    # for the same command to measure
    device_lock: str = "wait"  # another run is timing on a device of this one: wait for its end, or
    # refuse; off: time beside it, for tests alone
    resume: str = "auto"  # auto (newest unfinished run of the same plan), never, or a run folder
    results_dir: str = "results/runs"  # run folders are made here


def as_written(value: Any) -> str:
    """A value as a command line has it: true, not True, and null, not None."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def register() -> None:
    """Makes the schema known to Hydra as `schema`, which conf/config.yaml names first."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name="schema", node=BenchConfig)


def to_plain(config: Any) -> dict[str, Any]:
    """A composed DictConfig (without Hydra's part) -> nested dict; `instrument` becomes the list of
    what is switched on, workload.shape the two lengths that it stands for.

    Raises:
        SettingsError: a key that the schema does not have (Hydra lets `+key=value` add one); a
            workload.shape that is none.
    """
    from omegaconf import OmegaConf

    from harness.settings.lengths import linked

    plain = OmegaConf.to_container(config, resolve=True, enum_to_str=True)
    assert isinstance(plain, dict)
    cfg: dict[str, Any] = {str(key): value for key, value in plain.items()}
    _refuse_unknown(cfg, asdict(BenchConfig()), "")
    cfg["instrument"] = [name for name, on in cfg["instrument"].items() if on]
    cfg["workload"] = linked(cfg["workload"])
    return cfg


def _refuse_unknown(cfg: dict[str, Any], known: dict[str, Any], prefix: str) -> None:
    for key, value in cfg.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {prefix}{near[0]}?" if near else ""
            raise SettingsError(f"{prefix}{key}: no such setting{hint}")
        if isinstance(known[key], dict):
            _refuse_unknown(value, known[key], f"{prefix}{key}.")
