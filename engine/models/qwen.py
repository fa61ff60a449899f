"""Qwen3 (and Qwen2 through the same classes): arithmetic only.

Shapes: T query tokens of a step, H hidden, h local query heads, k local K/V heads, D head_dim,
I intermediate, N rows that sample, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from engine.attention import Attention
from engine.comm.base import Communicator
from engine.comm.types import Site
from engine.inputs.batch import ForwardBatch
from engine.kernels import USUAL, Kernels, runs_triton
from engine.kernels.linear import gated_linear
from engine.kv_cache import KVCache
from engine.layers import (
    RMSNorm,
    RotaryEmbedding,
    SiluAndMul,
    norm_and_rotate,
    norm_rotate_store,
)
from engine.parallel import (
    MergedColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from engine.shape import ModelShape


@dataclass(frozen=True, slots=True)
class _Build:
    """What every module of one model is built with."""

    shape: ModelShape
    comm: Communicator
    attention: str
    dtype: torch.dtype
    device: torch.device | str
    kernels: Kernels

    def norm(self, size: int) -> RMSNorm:
        return RMSNorm(
            size,
            self.shape.rms_norm_eps,
            dtype=self.dtype,
            device=self.device,
            kernels=self.kernels,
        )


class Qwen3Attention(nn.Module):
    """Fused QKV -> per-head norm of Q and K -> RoPE -> paged attention -> this rank's summand of
    the output projection. V is neither normed nor rotated."""

    def __init__(self, build: _Build) -> None:
        super().__init__()
        shape, comm = build.shape, build.comm
        self.head_dim = shape.head_dim
        self.qkv_proj = QKVParallelLinear(
            shape.hidden_size,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            comm,
            bias=shape.qkv_bias,
            dtype=build.dtype,
            device=build.device,
            kernels=build.kernels,
        )
        self.o_proj = RowParallelLinear(
            shape.num_heads * shape.head_dim,
            shape.hidden_size,
            comm,
            Site.ATTN_O_PROJ,
            bias=shape.o_bias,
            dtype=build.dtype,
            device=build.device,
            kernels=build.kernels,
        )
        self.q_norm = build.norm(shape.head_dim) if shape.qk_norm else None
        self.k_norm = build.norm(shape.head_dim) if shape.qk_norm else None
        self.attention = Attention(shape.head_dim**-0.5, build.attention)
        self.kernels = build.kernels

    def qkv(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [T, H] -> q [T, h, D], k and v [T, k, D], as projected."""
        proj = self.qkv_proj
        q, k, v = proj(x).split([proj.q_size, proj.kv_size, proj.kv_size], dim=-1)
        return (
            q.view(-1, proj.num_heads, self.head_dim),
            k.view(-1, proj.num_kv_heads, self.head_dim),
            v.view(-1, proj.num_kv_heads, self.head_dim),
        )

    def forward(
        self,
        x: torch.Tensor,
        rotary: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        q, k, v = self.qkv(x)
        norms = (self.q_norm, self.k_norm)
        if self.kernels.fused == "store" and runs_triton(q):
            caches = (k_cache, v_cache, batch.slot_mapping)
            q = norm_rotate_store(q, k, v, *norms, rotary, *caches)
            found = self.attention.over_cache(q, k_cache, v_cache, batch)
        else:
            q, k = norm_and_rotate(q, k, *norms, rotary, self.kernels)
            found = self.attention(q, k, v, k_cache, v_cache, batch)
        return self.o_proj.partial(found.flatten(1))


class Qwen3MLP(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up fused."""

    def __init__(self, build: _Build) -> None:
        super().__init__()
        shape, comm = build.shape, build.comm
        self.gate_up_proj = MergedColumnParallelLinear(
            shape.hidden_size,
            {"gate_proj": shape.intermediate_size, "up_proj": shape.intermediate_size},
            comm,
            bias=False,
            dtype=build.dtype,
            device=build.device,
            kernels=build.kernels,
        )
        self.act = SiluAndMul(build.kernels)
        self.down_proj = RowParallelLinear(
            shape.intermediate_size,
            shape.hidden_size,
            comm,
            Site.MLP_DOWN_PROJ,
            bias=False,
            dtype=build.dtype,
            device=build.device,
            kernels=build.kernels,
        )
        self.kernels = build.kernels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, H] -> this rank's summand of the result [T, H]."""
        if self.kernels.linear == "triton":
            return self.down_proj.partial(gated_linear(x, self.gate_up_proj.weight))
        return self.down_proj.partial(self.act(self.gate_up_proj(x)))


class Qwen3DecoderLayer(nn.Module):
    """Pre-norm attention and MLP. The MLP's result is summed over ranks and added to the residual
    by the next norm, be it the next layer's or the final one: both of a layer's sums are followed
    by an addition and a norm, which a communicator may do in one."""

    def __init__(self, build: _Build) -> None:
        super().__init__()
        self.comm = build.comm
        self.input_layernorm = build.norm(build.shape.hidden_size)
        self.self_attn = Qwen3Attention(build)
        self.post_attention_layernorm = build.norm(build.shape.hidden_size)
        self.mlp = Qwen3MLP(build)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        rotary: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        batch: ForwardBatch,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, H] and residual [T, H]: this rank's summand of the MLP's result and the residual of
        the layer before, or the embedding and None. Returns the same of this layer."""
        if residual is None:
            x, residual = self.input_layernorm(x), x
        else:
            x, residual = self.comm.reduce_add_norm(
                x, residual, self.input_layernorm, self.mlp.down_proj.site
            )
        partial = self.self_attn(x, rotary, k_cache, v_cache, batch)
        x, residual = self.comm.reduce_add_norm(
            partial, residual, self.post_attention_layernorm, self.self_attn.o_proj.site
        )
        return self.mlp(x), residual


class Qwen3Model(nn.Module):
    """Embedding to final norm: what compiles into one graph. It reads only tensors of its
    arguments, and no layer knows its number, so that all layers are the same code."""

    def __init__(self, build: _Build, max_model_len: int) -> None:
        super().__init__()
        shape = build.shape
        self.embed_tokens = VocabParallelEmbedding(
            shape.vocab_size,
            shape.hidden_size,
            build.comm,
            dtype=build.dtype,
            device=build.device,
        )
        self.rotary = RotaryEmbedding(
            shape.head_dim, max_model_len, shape.rope_theta, build.device, shape.rope
        )
        self.layers = nn.ModuleList(Qwen3DecoderLayer(build) for _ in range(shape.num_layers))
        self.norm = build.norm(shape.hidden_size)
        self.comm = build.comm

    def forward(self, batch: ForwardBatch, kv_cache: KVCache) -> torch.Tensor:
        x = self.embed_tokens(batch.input_ids)
        rotary = self.rotary(batch.positions)
        residual: torch.Tensor | None = None
        for layer, (k_cache, v_cache) in zip(self.layers, kv_cache.layers, strict=True):
            x, residual = layer(x, residual, rotary, k_cache, v_cache, batch)
        assert residual is not None
        return self.comm.reduce_add_norm(x, residual, self.norm, Site.MLP_DOWN_PROJ)[0]


class Qwen3ForCausalLM(nn.Module):
    """One rank's model, its parameters uninitialised until engine.weights fills them.

    Args:
        attention: name of an attention backend, or auto.
        max_model_len: rows of the rotary table; positions of a batch are below it.
        kernels: the own kernels that it takes on a GPU.

    Raises:
        ConfigError: comm.world ranks cannot share this shape, or an unknown attention backend.
    """

    def __init__(
        self,
        shape: ModelShape,
        comm: Communicator,
        attention: str,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device | str,
        kernels: Kernels = USUAL,
    ) -> None:
        super().__init__()
        shape.check_tp(comm.world)
        build = _Build(shape, comm, attention, dtype, device, kernels)
        self.model = Qwen3Model(build, max_model_len)
        self.lm_head = ParallelLMHead(
            shape.vocab_size,
            shape.hidden_size,
            comm,
            dtype=dtype,
            device=device,
            shared_with=self.model.embed_tokens if shape.tied else None,
        )

    def forward(self, batch: ForwardBatch, kv_cache: KVCache) -> torch.Tensor:
        """-> hidden states [T, H] after the final norm; 2L+1 all-reduces."""
        return self.model(batch, kv_cache)

    def compute_logits(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor | None:
        """hidden [T, H] -> logits [N, V] of the rows in batch.logits_indices, on rank 0; None on
        the others, and everywhere without a gather when N = 0."""
        return self.lm_head(hidden, batch.logits_indices)
