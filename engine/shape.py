"""ModelShape: what config.json says of a model; only this file opens a Hugging Face config."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.comm.types import Kind, Site
from engine.errors import ConfigError
from engine.rope import RopeScaling, read_rope

MODEL_TYPES = ("qwen3", "qwen2")
_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes and switches of one dense Qwen3 or Qwen2 model.

    Attributes:
        num_layers, num_heads, num_kv_heads: decoder layers, query heads, K/V heads.
        head_dim: width of one head; need not be hidden_size / num_heads.
        rope_theta, rope: base of the rotary frequencies, and their scaling, if any.
        max_position: max_position_embeddings: positions that the model was trained for, where no
            scaling says otherwise.
        tied: the LM head uses the embedding table.
        qk_norm: per-head RMSNorm of Q and K before RoPE (Qwen3 always, Qwen2 never).
        qkv_bias, o_bias: bias of the q, k, v and of the output projection (Qwen3: both follow
            attention_bias; Qwen2: q, k, v only).
        dtype: of the checkpoint, "float32" where the config names none (transformers' rule).
        eos_token_ids: of config.json and generation_config.json together.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position: int
    tied: bool
    qk_norm: bool
    qkv_bias: bool
    o_bias: bool
    dtype: str
    eos_token_ids: tuple[int, ...]
    rope: RopeScaling | None = None

    @classmethod
    def from_hf(cls, path: str | Path) -> ModelShape:
        """Reads config.json (and generation_config.json if there is one) of a local directory.

        The JSON is read as it stands, because transformers 4 and 5 keep rope_theta and the dtype in
        different places and a default taken for a missing value would be silently wrong.

        Raises:
            ConfigError: no config.json, a missing value, or anything this engine does not compute:
                another model_type, another rope type than rope.ROPE_TYPES, sliding windows,
                another activation, quantised weights.
        """
        config = _read_json(Path(path) / "config.json", required=True)
        generation = _read_json(Path(path) / "generation_config.json", required=False)
        model_type = config.get("model_type")
        if model_type not in MODEL_TYPES:
            raise ConfigError(
                f"model_type={model_type!r} in {path}: this engine runs {', '.join(MODEL_TYPES)}"
            )
        _refuse_unsupported(config)

        def need(name: str) -> Any:
            if config.get(name) is None:
                raise ConfigError(f"{path}/config.json has no {name}: add it")
            return config[name]

        def count(name: str) -> int:
            value = need(name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"{path}/config.json: {name}={value!r} must be a whole number")
            return value

        heads, hidden = count("num_attention_heads"), count("hidden_size")
        is_qwen3 = model_type == "qwen3"
        # Qwen2's config has no head_dim; Qwen3's always has, and it need not be hidden / heads.
        own = is_qwen3 or config.get("head_dim") is not None
        head_dim = count("head_dim") if own else hidden // heads
        if head_dim % 2:
            raise ConfigError(f"head_dim={head_dim} in {path}: rotary pairs need an even one")
        max_position = count("max_position_embeddings")
        rope_theta, rope = read_rope(config, head_dim, max_position)
        bias = bool(config.get("attention_bias", False))
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
        if dtype not in _DTYPES:
            raise ConfigError(f"dtype={dtype!r} in {path}: this engine runs {', '.join(_DTYPES)}")
        return cls(
            model_type=model_type,
            vocab_size=count("vocab_size"),
            hidden_size=hidden,
            num_layers=count("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=count("num_key_value_heads"),
            head_dim=head_dim,
            intermediate_size=count("intermediate_size"),
            rms_norm_eps=float(need("rms_norm_eps")),
            rope_theta=rope_theta,
            rope=rope,
            max_position=max_position,
            tied=bool(config.get("tie_word_embeddings", False)),
            qk_norm=is_qwen3,
            qkv_bias=bias if is_qwen3 else True,
            o_bias=bias if is_qwen3 else False,
            dtype=dtype,
            eos_token_ids=_eos_ids(config, generation),
        )

    @property
    def longest(self) -> int:
        """Largest max_model_len: max_position, or what a rope scaling extends it to (vLLM's rule:
        max_position * factor; for yarn its original positions * factor)."""
        return self.max_position if self.rope is None else self.rope.limit

    @property
    def longest_by_default(self) -> int:
        """max_model_len where none is given: `longest`, but for dynamic scaling only the positions
        for which its result is certain to be transformers' (see RopeScaling)."""
        dynamic = self.rope is not None and self.rope.kind == "dynamic"
        return self.max_position if dynamic else self.longest

    def legal_tp(self) -> list[int]:
        """TP sizes that split heads and MLP evenly: tp divides the query heads and the intermediate
        size, and divides the K/V heads or is a multiple of them (each is then on several ranks)."""
        kv = self.num_kv_heads
        return [
            tp
            for tp in range(1, self.num_heads + 1)
            if self.num_heads % tp == 0
            and (kv % tp == 0 or tp % kv == 0)
            and self.intermediate_size % tp == 0
        ]

    def check_tp(self, tp: int) -> None:
        """Raises ConfigError, with the legal sizes, where `tp` ranks cannot share the model."""
        legal = self.legal_tp()
        if tp not in legal:
            raise ConfigError(
                f"tp={tp}: {self.num_heads} query heads, {self.num_kv_heads} KV heads and an "
                f"intermediate size of {self.intermediate_size} need a TP size in "
                f"{{{', '.join(map(str, legal))}}}"
            )

    def kv_heads_local(self, tp: int) -> int:
        """K/V heads that one of `tp` ranks holds; at least one."""
        return max(1, self.num_kv_heads // tp)

    def kv_bytes_per_token(self, tp: int, itemsize: int) -> int:
        """Bytes of K and V of one token on one rank, all layers."""
        return 2 * self.num_layers * self.kv_heads_local(tp) * self.head_dim * itemsize

    def expected_collectives(self, tp: int, samples: bool) -> tuple[tuple[Kind, Site], ...]:
        """The collectives of one forward on each rank, in order: 2L+1 all-reduces, and one gather
        if the step samples; none at tp=1. Token ids sent after sampling are not part of it, nor is
        what SamplingParams.prompt_logprobs adds: a gather before it for each 256 prompt rows."""
        if tp == 1:
            return ()
        layer = ((Kind.ALL_REDUCE, Site.ATTN_O_PROJ), (Kind.ALL_REDUCE, Site.MLP_DOWN_PROJ))
        head = ((Kind.GATHER, Site.LM_HEAD),) if samples else ()
        return ((Kind.ALL_REDUCE, Site.EMBED), *layer * self.num_layers, *head)


def _read_json(file: Path, required: bool) -> dict[str, Any]:
    if not file.is_file():
        if required:
            raise ConfigError(f"{file} does not exist: give a directory in Hugging Face format")
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file} holds no JSON object")
    return content


def _refuse_unsupported(config: dict[str, Any]) -> None:
    """Refuses by name what would otherwise change the model's function unnoticed."""
    if config.get("use_sliding_window"):
        raise ConfigError("use_sliding_window=true: sliding-window attention is not implemented")
    kinds = sorted(set(config.get("layer_types") or ()) - {"full_attention"})
    if kinds:
        raise ConfigError(f"layer_types={kinds}: only full_attention layers are implemented")
    act = config.get("hidden_act", "silu")
    if act != "silu":
        raise ConfigError(f"hidden_act={act!r}: only silu is implemented")
    if config.get("quantization_config"):
        raise ConfigError("quantization_config: quantised checkpoints are not implemented")


def _eos_ids(*configs: dict[str, Any]) -> tuple[int, ...]:
    ids: list[int] = []
    for config in configs:
        value = config.get("eos_token_id")
        if value is not None:
            ids.extend(value if isinstance(value, list) else [value])
    return tuple(dict.fromkeys(int(i) for i in ids))
