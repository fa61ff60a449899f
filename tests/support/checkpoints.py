"""Tiny Hugging Face checkpoints by transformers, and what transformers computes from them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Tiny:
    """What a tiny checkpoint is like. Sizes are small, unequal, and not powers of two where they
    need not be, so that a mixed-up dimension shows."""

    model_type: str = "qwen3"
    vocab_size: int = 97
    hidden_size: int = 24
    num_layers: int = 3
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    intermediate_size: int = 40
    tied: bool = False
    attention_bias: bool = False
    rope_theta: float = 10_000.0
    rope: tuple[tuple[str, Any], ...] = ()  # items of rope_scaling
    max_position: int = 256
    dtype: str = "float32"
    max_shard_size: str = "5GB"
    seed: int = 0


def write(tiny: Tiny, folder: Path) -> Path:
    """Saves the checkpoint with transformers' own save_pretrained.

    Every tensor is random: transformers starts norms at one and biases at zero, which would hide a
    norm or a bias that is forgotten, and its weights of std 0.02 would hide everything else.
    """
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": tiny.vocab_size,
        "hidden_size": tiny.hidden_size,
        "num_hidden_layers": tiny.num_layers,
        "num_attention_heads": tiny.num_heads,
        "num_key_value_heads": tiny.num_kv_heads,
        "intermediate_size": tiny.intermediate_size,
        "tie_word_embeddings": tiny.tied,
        "rope_theta": tiny.rope_theta,
        "rope_scaling": dict(tiny.rope) or None,
        "max_position_embeddings": tiny.max_position,
        "eos_token_id": 2,
    }
    if tiny.model_type == "qwen3":
        config: Any = transformers.Qwen3Config(
            **sizes, head_dim=tiny.head_dim, attention_bias=tiny.attention_bias
        )
        model: Any = transformers.Qwen3ForCausalLM(config)
    else:
        assert tiny.head_dim * tiny.num_heads == tiny.hidden_size
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes))
    generator = torch.Generator().manual_seed(tiny.seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean = 1.0 if name.endswith("norm.weight") else 0.0
            fan_in = parameter.shape[-1] if parameter.ndim == 2 else 4.0
            parameter.normal_(mean, fan_in**-0.5, generator=generator)
    model.to(getattr(torch, tiny.dtype))
    model.save_pretrained(folder, max_shard_size=tiny.max_shard_size)
    return folder


@cache
def _reference(path: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@torch.inference_mode()
def reference_logits(path: Path, token_ids: list[int]) -> torch.Tensor:
    """transformers' float32 logits [len(token_ids), V] of one sequence."""
    return _reference(path)(torch.tensor([token_ids])).logits[0]


@torch.inference_mode()
def reference_generate(path: Path, prompt: list[int], **options: Any) -> list[int]:
    """What transformers' generate adds to the prompt, greedily, with its own processors."""
    ids = torch.tensor([prompt])
    found = _reference(path).generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, **options
    )
    return [int(token) for token in found[0, len(prompt) :]]


class Checkpoints:
    """Tiny checkpoints in a folder, each written once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._paths: dict[Tiny, Path] = {}

    def __call__(self, **changes: Any) -> Path:
        tiny = Tiny(**changes)
        if tiny not in self._paths:
            self._paths[tiny] = write(tiny, self._folder / f"tiny{len(self._paths)}")
        return self._paths[tiny]
