"""EngineConfig: everything an engine is told, validated before anything heavy starts."""

from __future__ import annotations

import re
from dataclasses import dataclass

from engine.errors import ConfigError

DTYPES = ("auto", "bfloat16", "float16", "float32")
COMPILE_MODES = ("off", "layer", "model")
ATTENTION_BACKENDS = ("auto", "sdpa", "flash2", "flash2_triton", "flash4", "triton")
COMM_PATHS = ("auto", "solo", "gloo", "nccl", "symm_mem", "symm_fused")
LOAD_FORMATS = ("auto", "dummy")
FUSED = ("auto", "none", "layers", "store")
LINEAR = ("auto", "torch", "triton")
RANKS = ("spawn", "torchrun")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How one engine runs. Frozen; what `auto` became is read back from `LLM.effective`.

    Attributes:
        model: directory in Hugging Face format (config.json; safetensors unless load_format=dummy).
        tp: number of ranks; each is a process of its own when tp > 1.
        dtype: of weights, activations and K/V; auto is the checkpoint's.
        ranks: spawn starts a process for each on this machine; torchrun takes those that torchrun
            has started, on one node or several (engine.under_torchrun).
        load_format: auto reads the checkpoint; dummy fills with seeded normals of std 0.02.
        comm: how ranks talk; whatever is asked for, tp=1 has nobody to talk to and runs `solo`.
            symm_mem: all-reduces over memory that the GPUs share (comm/symmetric.py), the rest and
            what that cannot sum by NCCL; symm_fused: and a sum that a norm follows is one kernel
            with it (comm/fused.py), but in compiled code, which sums as by symm_mem; auto:
            symm_fused where it can be, else nccl; gloo on a CPU.
        device: auto is cuda where a GPU is visible, else cpu. cuda:2 is GPUs 2, 3, .. for ranks
            0, 1, .. (cuda is cuda:0), so that one process can put engines on different GPUs.
        enforce_eager: True: no CUDA graphs.
        graph_prompt_tokens: rows of the largest step with prompts that replays a CUDA graph; 0:
            none does; None: as many as a GPU computes while the host launches them
            (graph_shapes.py), none where the attention's prompts cannot be captured.
        compile: off | layer (each decoder layer one region) | model (embedding to final norm one
            full graph).
        fused: own kernels of steps on a GPU that torch does not compile. none: torch's operators;
            layers: norm, residual add + norm, norm + rotation of Q and K, and SwiGLU's activation
            are one kernel each; store: and the one that rotates K writes K and V to the cache;
            auto: store on a GPU, none on a CPU. By comm=symm_fused the addition and norm behind a
            sum over ranks are part of that one's kernel with each of them.
        linear: products with the layers' weights. torch: cuBLAS; triton: those of few rows by an
            own kernel where that is faster (kernels/linear.py), with SwiGLU's activation in it;
            auto: triton on a GPU, torch on a CPU.
        max_model_len: prompt + output of one request at most; None: the model's own limit
            (ModelShape.longest_by_default; rope scaling extends it).
        max_num_seqs: requests resident at once.
        max_num_batched_tokens: query tokens of one step at most (the chunked-prefill budget).
        page_size: tokens of one K/V page; None: what the attention backend likes (flash2
            and the other two by flash-attn: 256, triton: 64, sdpa: 16).
        num_pages: pages of the cache; None: from free memory (`memory_utilization` of the GPU's
            memory; on a CPU what max_num_seqs requests of max_model_len need, at most
            `cpu_kv_bytes`).
        overlap: plan and launch the next step while the device works on one, before its ids are
            read; None: on GPUs.
        prefix_cache: reuse full pages of equal prefixes.
        seed: base of the per-request seeds and of dummy weights.
        threads_per_rank: intra-op threads of one rank on CPU, threads that build kernels (up to 8)
            on a GPU; None: cores // tp.
        cache_dir: compile caches (one folder a rank below it); None: torch's own default.
        timeout_s: how long a rank waits in a collective before it gives up.

    Raises:
        ConfigError: a value outside its range or an unknown choice.
    """

    model: str
    tp: int = 1
    dtype: str = "auto"
    load_format: str = "auto"
    ranks: str = "spawn"
    device: str = "auto"
    enforce_eager: bool = False
    graph_prompt_tokens: int | None = None
    compile: str = "off"
    attention: str = "auto"
    comm: str = "auto"
    fused: str = "auto"
    linear: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    page_size: int | None = None
    num_pages: int | None = None
    memory_utilization: float = 0.9
    cpu_kv_bytes: int = 1 << 30
    overlap: bool | None = None
    prefix_cache: bool = True
    seed: int = 0
    threads_per_rank: int | None = None
    cache_dir: str | None = None
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        choices = {
            "dtype": DTYPES,
            "load_format": LOAD_FORMATS,
            "compile": COMPILE_MODES,
            "attention": ATTENTION_BACKENDS,
            "comm": COMM_PATHS,
            "fused": FUSED,
            "linear": LINEAR,
            "ranks": RANKS,
        }
        for name, allowed in choices.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ConfigError(f"{name}={value!r}: choose one of {', '.join(allowed)}")
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", str(self.device)):
            raise ConfigError(f"device={self.device!r}: give auto, cpu, cuda, or cuda:N")
        at_least_one = ("tp", "max_num_seqs", "max_num_batched_tokens")
        optional = ("max_model_len", "num_pages", "page_size", "threads_per_rank")
        for name in at_least_one + optional:
            value = getattr(self, name)
            if value is None and name in optional:
                continue
            if not isinstance(value, int):
                raise ConfigError(f"{name}={value!r}: give an integer")
            if value < 1:
                raise ConfigError(f"{name}={value}: give at least 1")
        most = self.graph_prompt_tokens
        if most is not None and not (isinstance(most, int) and most >= 0):
            raise ConfigError(f"graph_prompt_tokens={most!r}: give an integer of at least 0")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens}: must be at least "
                f"max_num_seqs={self.max_num_seqs}, or a full decode step would not fit"
            )
        if not 0 < self.memory_utilization <= 1:
            raise ConfigError(
                f"memory_utilization={self.memory_utilization}: give a value in (0, 1]"
            )
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed={self.seed}: give an integer in [0, 2^63)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig(EngineConfig):
    """A configuration in which `auto` and None are replaced by what this machine and model make of
    them (see resolve.py); only `num_pages` may be None still, on a GPU.

    Attributes:
        device: cpu or cuda; first_gpu: the n-th rank of a machine runs on GPU first_gpu + n.
    """

    graph_prompt_tokens: int = 0
    max_model_len: int
    page_size: int
    threads_per_rank: int
    first_gpu: int = 0
