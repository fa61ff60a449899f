"""What `auto` becomes on this machine for this model; impossible choices are refused."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import os
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import permutations
from typing import Any

import torch

from engine.attention import flash, flash4, flash_triton, triton_paged
from engine.attention.obstacles import flash2_obstacle, flash4_obstacle, triton_obstacle
from engine.comm.rendezvous import LaunchedBy
from engine.config import EngineConfig, ResolvedConfig
from engine.errors import ConfigError
from engine.graph_shapes import prompt_limit
from engine.kv_cache import KVCache
from engine.shape import ModelShape

logger = logging.getLogger(__name__)

# What this version can run, by device type; the others of config.py are refused by name. auto takes
# the first that can run: by measurement (attention/flash_triton.py). flash4 comes last: an engine
# with it starts 6 to 7 s later on an H200, and of prompts of 128 to 4,096 tokens (Qwen3 0.6B) those
# of 4,096 alone are FASTER, by 26 and 37 %.
ATTENTION = {"cpu": ("sdpa",), "cuda": ("flash2_triton", "flash2", "triton", "sdpa", "flash4")}
PAGE_SIZES = {
    "flash2": flash.PAGE_MULTIPLE,
    "flash2_triton": flash_triton.PAGE_MULTIPLE,
    "flash4": flash4.PAGE_MULTIPLE,
    "triton": triton_paged.PAGE_SIZE,
    "sdpa": 16,
}
# The first where GPUs reach each other's memory. In CUDA graphs of Qwen3 0.6B and 8B on two H200s,
# batch 1 to 256, TPOT by symm_fused was 1.10 to 1.24 times as fast as by symm_mem in each of ten
# cells, and 1.15 to 1.28 times as fast as by nccl. All collectives of a step took by nccl, symm_mem
# and symm_fused (whose sums hold the addition and the norm) 386, 330 and 209 us with 0.6B at batch
# 1, and 2,341, 1,269 and 889 us with 8B at batch 256.
COMM = {"cpu": ("gloo",), "cuda": ("symm_fused", "symm_mem", "nccl")}
SHARED = ("symm_fused", "symm_mem")
FUSED = {"cpu": ("none",), "cuda": ("store", "layers", "none")}
LINEAR = {"cpu": ("torch",), "cuda": ("triton", "torch")}

# Attention backends whose prompts read nothing back on the host, so that a graph can hold them.
CAPTURED_PROMPTS = ("flash2", "flash2_triton", "flash4", "triton")

NO_TRITON = (
    "on a GPU the engine needs the package triton, which is not installed: whatever attention, "
    "fused and linear are, the sampler and what writes K and V to their pages are Triton kernels; "
    "pip install triton or set device=cpu"
)


def resolve(config: EngineConfig, shape: ModelShape) -> ResolvedConfig:
    """Replaces every `auto` and None that can be decided without loading the model.

    `num_pages` on a GPU stays None: it depends on the memory that the weights leave.

    Raises:
        ConfigError: the model or this machine cannot do what is asked.
    """
    shape.check_tp(config.tp)
    ranks_here = _ranks_here(config)
    device, first_gpu = _device(config, ranks_here)
    if device == "cuda" and importlib.util.find_spec("triton") is None:
        raise ConfigError(f"device={config.device!r}: {NO_TRITON}")
    max_model_len = config.max_model_len or shape.longest_by_default
    if max_model_len > shape.longest:
        raise ConfigError(
            f"max_model_len={max_model_len}: the model's positions end at {shape.longest}"
        )
    if max_model_len > shape.longest_by_default:
        logger.warning(
            "max_model_len=%d: past %d positions dynamic rope scaling turns each token by the "
            "length up to it; transformers turns a prompt as a whole by the prompt's own length",
            max_model_len,
            shape.longest_by_default,
        )
    if config.enforce_eager is False and device == "cpu":
        raise ConfigError(
            "enforce_eager=False: CUDA graphs need a CUDA device, and this engine runs on the CPU; "
            "set enforce_eager=True"
        )
    dtype = shape.dtype if config.dtype == "auto" else config.dtype
    attention = _attention(config, shape, device, first_gpu, dtype)
    decided: dict[str, Any] = {
        "device": device,
        "first_gpu": first_gpu,
        "dtype": dtype,
        "attention": attention,
        "graph_prompt_tokens": _graph_prompt_tokens(config, shape, attention),
        "page_size": config.page_size or PAGE_SIZES[attention],
        "comm": _comm(config, device, first_gpu, dtype, ranks_here),
        "fused": _choose("fused", config.fused, FUSED[device], device),
        "linear": _choose("linear", config.linear, LINEAR[device], device),
        "max_model_len": max_model_len,
        "overlap": device == "cuda" if config.overlap is None else config.overlap,
        "threads_per_rank": config.threads_per_rank or max(1, _cores() // ranks_here),
    }
    asked = {field.name: getattr(config, field.name) for field in fields(config)}
    resolved = ResolvedConfig(**{**asked, **decided})
    if resolved.num_pages is None and device == "cpu":
        resolved = replace(resolved, num_pages=_cpu_pages(resolved, shape))
    logger.info(
        "attention=%s comm=%s device=%s dtype=%s",
        resolved.attention,
        resolved.comm,
        resolved.device,
        resolved.dtype,
    )
    return resolved


def _ranks_here(config: EngineConfig) -> int:
    """How many of the ranks share this machine."""
    if config.ranks == "spawn" or config.tp == 1:
        return config.tp
    me = LaunchedBy.torchrun()
    if me.rank != 0 or config.tp > me.world:
        raise ConfigError(
            f"ranks='torchrun': tp={config.tp} in the process of rank {me.rank}, and torchrun has "
            f"started {me.world}; build engines in that of rank 0, of at most as many ranks"
        )
    return min(config.tp, me.local_world)


def _device(config: EngineConfig, ranks_here: int) -> tuple[str, int]:
    """-> cpu or cuda, and the GPU of rank 0."""
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device, _, first = config.device.partition(":")
    first_gpu = int(first or 0)
    if device == "auto":
        device = "cuda" if visible else "cpu"
    if device == "cuda" and first_gpu + ranks_here > visible:
        raise ConfigError(
            f"tp={config.tp}: needs {first_gpu + ranks_here} GPUs here, the first being number "
            f"{first_gpu}; {visible} visible; lower tp, begin at a lower one or set device=cpu"
        )
    if first_gpu and ranks_here != config.tp:
        raise ConfigError(f"device={config.device!r}: over several nodes give cuda")
    return device, first_gpu


def _attention(
    config: EngineConfig, shape: ModelShape, device: str, first_gpu: int, dtype: str
) -> str:
    """auto is the first of ATTENTION that can run; one asked for by name runs or is an error."""
    allowed = ATTENTION[device]
    page_size, head_dim = config.page_size, shape.head_dim
    obstacles: dict[str, Callable[[], str | None]] = {
        "flash2": lambda: flash2_obstacle(page_size, head_dim, dtype),
        "flash2_triton": lambda: (
            flash2_obstacle(page_size, head_dim, dtype) or triton_obstacle(head_dim)
        ),
        "triton": lambda: triton_obstacle(head_dim),
        "sdpa": lambda: None,
        "flash4": lambda: flash4_obstacle(page_size, head_dim, dtype, _capability(first_gpu)),
    }
    if config.attention != "auto":
        name = _choose("attention", config.attention, allowed, device)
        reason = obstacles[name]()
        if reason is not None:
            raise ConfigError(f"attention={name!r}: {reason}")
        return name
    name = next(name for name in allowed if obstacles[name]() is None)
    for other in allowed[: allowed.index(name)]:
        logger.warning("attention=auto takes %s, not %s: %s", name, other, obstacles[other]())
    return name


def _graph_prompt_tokens(config: EngineConfig, shape: ModelShape, attention: str) -> int:
    if config.enforce_eager:
        return 0
    asked, most = config.graph_prompt_tokens, config.max_num_batched_tokens
    if attention not in CAPTURED_PROMPTS:
        if asked:
            raise ConfigError(
                f"graph_prompt_tokens={asked}: prompts by attention={attention} wait for the host, "
                f"which no graph can hold; set 0 or attention={'|'.join(CAPTURED_PROMPTS)}"
            )
        return 0
    return prompt_limit(shape, config.tp, most) if asked is None else min(asked, most)


def _capability(gpu: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(gpu)


def _choose(name: str, value: str, allowed: tuple[str, ...], device: str) -> str:
    if value == "auto":
        return allowed[0]
    if value not in allowed:
        raise ConfigError(
            f"{name}={value!r}: on device {device} this engine has {', '.join(allowed)}; "
            f"choose one of them or auto"
        )
    return value


def _comm(config: EngineConfig, device: str, first_gpu: int, dtype: str, ranks_here: int) -> str:
    """auto is nccl where symmetric memory cannot be; asked for by name that is an error."""
    if config.tp == 1:
        allowed = ("solo", *COMM[device])
        _choose("comm", config.comm, allowed, device)
        return "solo"
    comm = _choose("comm", config.comm, COMM[device], device)
    if comm not in SHARED:
        return comm
    reach = torch.cuda.can_device_access_peer
    obstacle = symm_mem_obstacle(dtype, config.tp, ranks_here, first_gpu, reach)
    if obstacle is None:
        return comm
    if config.comm != "auto":
        raise ConfigError(f"comm={comm!r}: {obstacle}; set comm=nccl")
    logger.warning("comm=auto takes nccl, not %s: %s", comm, obstacle)
    return "nccl"


def symm_mem_obstacle(
    dtype: str, tp: int, ranks_here: int, first_gpu: int, reach: Callable[[int, int], bool]
) -> str | None:
    """Why ranks cannot sum over symmetric memory, None if they can.

    Args:
        ranks_here: how many of the tp share this machine, from GPU first_gpu on.
        reach: (one, other) -> whether GPU one can read the memory of GPU other.
    """
    if dtype == "float16":
        return "its kernels sum bfloat16 and float32, not dtype=float16"
    if ranks_here < tp:
        return (
            f"GPUs of one machine share memory, and {ranks_here} of tp={tp} ranks are on this one"
        )
    for one, other in permutations(range(first_gpu, first_gpu + tp), 2):
        if not reach(one, other):
            return f"GPU {one} cannot reach the memory of GPU {other}"
    return None


def _cores() -> int:
    """Cores that this process may use, which a container or taskset may limit."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_pages(config: ResolvedConfig, shape: ModelShape) -> int:
    itemsize = getattr(torch, config.dtype).itemsize
    page_bytes = KVCache.bytes_per_page(shape, config.tp, config.page_size, itemsize)
    wanted = config.max_num_seqs * -(-config.max_model_len // config.page_size)
    affordable = config.cpu_kv_bytes // page_bytes
    if affordable < 1:
        raise ConfigError(
            f"cpu_kv_bytes={config.cpu_kv_bytes}: one page of {config.page_size} tokens takes "
            f"{page_bytes} bytes; raise it or lower page_size"
        )
    return min(wanted, affordable)
