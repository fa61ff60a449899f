"""Tensor-parallel linear layers.

T is the number of tokens. A weight is [out, in]: "column parallel" splits its outputs over ranks,
"row parallel" its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from engine.comm.base import Communicator
from engine.comm.types import Site
from engine.errors import ConfigError
from engine.kernels import USUAL, Kernels
from engine.kernels.linear import linear
from engine.weights import CheckpointTensor, TensorSource, whole


def new_parameter(*size: int, dtype: torch.dtype, device: torch.device | str) -> nn.Parameter:
    """An uninitialised weight; this engine never trains."""
    return nn.Parameter(torch.empty(size, dtype=dtype, device=device), requires_grad=False)


def _share(what: str, total: int, world: int) -> int:
    if total % world:
        raise ConfigError(f"tp={world}: {what} of {total} cannot be split evenly")
    return total // world


class ReplicatedLinear(nn.Module):
    """The whole weight on every rank; no communication."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device | str,
        kernels: Kernels = USUAL,
    ) -> None:
        super().__init__()
        self.kernels = kernels
        self.weight = new_parameter(out_features, in_features, dtype=dtype, device=device)
        self.bias = new_parameter(out_features, dtype=dtype, device=device) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias, self.kernels)

    def checkpoint_tensors(self, path: str) -> dict[str, CheckpointTensor]:
        tensors = {f"{path}.weight": whole(self.weight)}
        if self.bias is not None:
            tensors[f"{path}.bias"] = whole(self.bias)
        return tensors


@dataclass(frozen=True, slots=True)
class Piece:
    """One checkpoint matrix inside a fused local weight: of its `total` rows this rank holds
    `count` from `start` on. An empty name stands for the layer's own name."""

    name: str
    total: int
    start: int
    count: int


def _fill_rows(part: torch.Tensor, start: int) -> Callable[[TensorSource], None]:
    """Copies rows start, start+1, ... of a checkpoint tensor into `part`, all of it."""

    def fill(source: TensorSource) -> None:
        part.copy_(source[start : start + part.shape[0]])

    return fill


class _FusedColumnParallel(nn.Module):
    """Pieces one below the other in one local weight, so that one matmul computes all of them."""

    def __init__(
        self,
        in_features: int,
        pieces: Sequence[Piece],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device | str,
        kernels: Kernels = USUAL,
    ) -> None:
        super().__init__()
        self.in_features, self.kernels = in_features, kernels
        self.pieces = tuple(pieces)
        local = sum(piece.count for piece in pieces)
        self.weight = new_parameter(local, in_features, dtype=dtype, device=device)
        self.bias = new_parameter(local, dtype=dtype, device=device) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in] (whole) -> [T, local rows]; no communication."""
        return linear(x, self.weight, self.bias, self.kernels)

    def checkpoint_tensors(self, path: str) -> dict[str, CheckpointTensor]:
        parent = path.rpartition(".")[0]
        tensors, at = {}, 0
        for piece in self.pieces:
            name = ".".join(filter(None, (parent, piece.name))) if piece.name else path
            rows = self.weight[at : at + piece.count]
            shape = (piece.total, self.in_features)
            tensors[f"{name}.weight"] = CheckpointTensor(shape, _fill_rows(rows, piece.start))
            if self.bias is not None:
                part = self.bias[at : at + piece.count]
                fill = _fill_rows(part, piece.start)
                tensors[f"{name}.bias"] = CheckpointTensor((piece.total,), fill)
            at += piece.count
        return tensors


class ColumnParallelLinear(_FusedColumnParallel):
    """Rank r holds the r-th block of out_features / world output rows."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        comm: Communicator,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device | str,
        kernels: Kernels = USUAL,
    ) -> None:
        count = _share("an output size", out_features, comm.world)
        piece = Piece("", out_features, comm.rank * count, count)
        super().__init__(
            in_features, [piece], bias=bias, dtype=dtype, device=device, kernels=kernels
        )


class MergedColumnParallelLinear(_FusedColumnParallel):
    """Several column-parallel matrices of one input in one weight: `outs` gives each one's name in
    the checkpoint and its output size. The local result holds this rank's block of each, in order.
    """

    def __init__(
        self,
        in_features: int,
        outs: dict[str, int],
        comm: Communicator,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device | str,
        kernels: Kernels = USUAL,
    ) -> None:
        pieces = []
        for name, total in outs.items():
            count = _share(f"an output size ({name})", total, comm.world)
            pieces.append(Piece(name, total, comm.rank * count, count))
        super().__init__(
            in_features, pieces, bias=bias, dtype=dtype, device=device, kernels=kernels
        )


class QKVParallelLinear(_FusedColumnParallel):
    """q_proj, k_proj and v_proj in one weight, split by heads.

    With fewer K/V heads than ranks each K/V head stands on world / num_kv_heads neighbouring ranks,
    those whose query heads read it.

    Attributes:
        num_heads, num_kv_heads: of this rank.
        q_size, kv_size: columns of q, and of each of k and v, in the local result.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        comm: Communicator,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device | str,
        kernels: Kernels = USUAL,
    ) -> None:
        rank, world = comm.rank, comm.world
        heads = _share("a number of query heads", num_heads, world)
        if world > num_kv_heads and world % num_kv_heads == 0:
            kv_heads, kv_start = 1, rank * num_kv_heads // world
        else:
            kv_heads = _share("a number of KV heads", num_kv_heads, world)
            kv_start = rank * kv_heads
        q_size, kv_size = heads * head_dim, kv_heads * head_dim
        q = Piece("q_proj", num_heads * head_dim, rank * q_size, q_size)
        k, v = (
            Piece(name, num_kv_heads * head_dim, kv_start * head_dim, kv_size)
            for name in ("k_proj", "v_proj")
        )
        super().__init__(
            in_features, [q, k, v], bias=bias, dtype=dtype, device=device, kernels=kernels
        )
        self.num_heads, self.num_kv_heads = heads, kv_heads
        self.q_size, self.kv_size = q_size, kv_size


class RowParallelLinear(nn.Module):
    """Rank r holds the r-th block of in_features / world input columns; results are summed.

    The bias is whole on every rank, and rank 0 alone adds it.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        comm: Communicator,
        site: Site,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device | str,
        kernels: Kernels = USUAL,
    ) -> None:
        super().__init__()
        self.comm, self.site, self.kernels = comm, site, kernels
        self.in_features = in_features
        local = _share("an input size", in_features, comm.world)
        self.start = comm.rank * local
        self.weight = new_parameter(out_features, local, dtype=dtype, device=device)
        self.bias = new_parameter(out_features, dtype=dtype, device=device) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in / world] -> the summed [T, out] on every rank; one all-reduce."""
        return self.comm.linear_all_reduce(x, self.weight, self.bias, self.site, self.kernels)

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in / world] -> this rank's summand [T, out], for Communicator.reduce_add_norm."""
        return self.comm.partial_linear(x, self.weight, self.bias, self.kernels)

    def checkpoint_tensors(self, path: str) -> dict[str, CheckpointTensor]:
        def fill(source: TensorSource) -> None:
            self.weight.copy_(source[:, self.start : self.start + self.weight.shape[1]])

        shape = (self.weight.shape[0], self.in_features)
        tensors = {f"{path}.weight": CheckpointTensor(shape, fill)}
        if self.bias is not None:
            tensors[f"{path}.bias"] = whole(self.bias)
        return tensors
