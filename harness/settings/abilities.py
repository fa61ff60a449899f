"""What the engines of others need and have; why a point of one is skipped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from harness.settings.config import EngineSection, as_written

if TYPE_CHECKING:
    from engine.shape import ModelShape


@dataclass(frozen=True, slots=True)
class Abilities:
    """One engine.

    Attributes:
        modules: importable module -> how to get it.
        gpu: whether it runs on CUDA devices alone.
        has: axis -> the values that it has; an axis that is not here has all of them.
        takes: settings of the section `engine`; the others must stand at their defaults.
        arrivals: whether requests may come over time.
        refuses: (configuration, model's shape) -> why that cannot run.
    """

    modules: Mapping[str, str] = field(default_factory=dict)
    gpu: bool = False
    has: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    takes: tuple[str, ...] = ()
    arrivals: bool = True
    refuses: Callable[[Mapping[str, Any], ModelShape | None], str | None] = lambda cfg, shape: None


def _nanovllm(cfg: Mapping[str, Any], shape: ModelShape | None) -> str | None:
    if cfg.get("workload", {}).get("temperature", 1.0) <= 1e-10:
        return "it refuses to decode greedily; set workload.temperature, of every engine alike"
    seqs = cfg.get("engine", {}).get("max_num_seqs") or 16
    if not cfg["enforce_eager"] and seqs > 8 and seqs % 16:
        return (
            f"its graphs end at the last multiple of 16 up to engine.max_num_seqs={seqs}, and a "
            "larger batch has none; give a multiple of 16"
        )
    if shape is None:
        return None
    if shape.model_type != "qwen3" or shape.rope is not None:
        return f"it computes qwen3 without rope scaling, not {cfg['model']['name']}"
    if shape.dtype not in ("bfloat16", "float16"):
        return f"flash-attn has no kernels of {shape.dtype}, the checkpoint's dtype"
    if shape.vocab_size % cfg["tp"] or shape.num_kv_heads % cfg["tp"]:
        return (
            f"tp={cfg['tp']} must divide the vocabulary of {shape.vocab_size} and the "
            f"{shape.num_kv_heads} K/V heads"
        )
    return None


PEERS: dict[str, Abilities] = {
    "transformers": Abilities(
        has={
            "tp": (1,),
            "enforce_eager": (True,),
            "compile": ("off",),
            "attention": ("auto", "sdpa"),
            "comm": ("auto",),
            "page_size": (None,),
        },
        takes=("max_model_len", "max_num_seqs", "threads_per_rank", "seed"),
        arrivals=False,
    ),
    "nanovllm": Abilities(
        modules={
            "nanovllm": "pip install git+https://github.com/GeeeekExplorer/nano-vllm",
            "flash_attn": "pip install flash-attn",
        },
        gpu=True,
        has={
            "compile": ("off",),
            "attention": ("auto", "flash2"),
            "comm": ("auto", "nccl"),
            "page_size": (None,),
            "dtype": ("auto",),
        },
        takes=("max_model_len", "max_num_seqs", "max_num_batched_tokens", "memory_utilization"),
        refuses=_nanovllm,
    ),
    "vllm": Abilities(
        modules={"vllm": "pip install 'rangefinder[peers]'"},
        gpu=True,
        has={"compile": ("off", "model"), "attention": ("auto",), "comm": ("auto",)},
        takes=(
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "num_pages",
            "overlap",
            "prefix_cache",
            "memory_utilization",
            "seed",
        ),
    ),
}


def skip_reason(
    cfg: Mapping[str, Any], gpus: int, packages: Mapping[str, str], shape: ModelShape | None = None
) -> str | None:
    """Why a resolved configuration cannot run by its backend; None if it can. What the engine does
    not have at all comes first, for no package helps there.

    Args:
        gpus: visible CUDA devices; packages: modules that are installed.
    """
    name = cfg["backend"]
    peer = PEERS[name]
    for axis, values in peer.has.items():
        if cfg.get(axis, values[0]) not in values:
            has = ", ".join("null" if value is None else as_written(value) for value in values)
            return f"backend={name} has {axis}={has}, not {as_written(cfg[axis])}"
    defaults = asdict(EngineSection())
    for setting, value in cfg.get("engine", {}).items():
        if setting not in peer.takes and value != defaults[setting]:
            return f"backend={name} has no setting engine.{setting}, here {as_written(value)}"
    arrivals = cfg.get("workload", {}).get("arrivals", "all")
    if arrivals != "all" and not peer.arrivals:
        return f"backend={name} takes requests all at once, not workload.arrivals={arrivals}"
    missing = [f"{module} is not installed ({how})" for module, how in peer.modules.items()
               if module not in packages]  # fmt: skip
    if peer.gpu and cfg["device"] != "cuda":
        where = "device=cpu" if gpus else "none visible"
        missing.insert(0, f"it needs a CUDA device, {where}")
    reason = "; ".join(missing) or peer.refuses(cfg, shape)
    return f"backend={name}: {reason}" if reason else None
