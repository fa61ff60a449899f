"""Checkpoint tensors -> this rank's parameters: each needed one exactly once, or an error.

A layer says which tensors of a checkpoint it takes, their whole shapes, and how it places its part
(`checkpoint_tensors`); the functions here read or make those tensors and hand them over one by one.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from engine.checkpoint import FLOATS, FileTensor, listed, scan
from engine.errors import CheckpointError

DUMMY_STD = 0.02
TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"
READERS = 4  # tensors that one rank reads at once
READ_BYTES = 512 << 20  # their whole sizes together; a larger tensor is read alone


class TensorSource(Protocol):
    """A tensor of which any part can be read; a torch.Tensor is one."""

    @property
    def shape(self) -> Sequence[int]: ...

    def __getitem__(self, index: Any, /) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """One tensor of a checkpoint: its whole shape, and `fill`, which reads this rank's part of it
    and puts that in its place, in the parameter's dtype."""

    shape: tuple[int, ...]
    fill: Callable[[TensorSource], None]


@runtime_checkable
class Loadable(Protocol):
    """A layer that takes tensors of a checkpoint; `path` is its own name within the model."""

    def checkpoint_tensors(self, path: str) -> dict[str, CheckpointTensor]: ...


def whole(parameter: torch.Tensor) -> CheckpointTensor:
    """A tensor that every rank holds whole."""

    def fill(source: TensorSource) -> None:
        parameter.copy_(source[:])

    return CheckpointTensor(tuple(parameter.shape), fill)


def checkpoint_tensors(model: nn.Module) -> dict[str, CheckpointTensor]:
    """Every tensor that the model takes from a checkpoint, by its name there."""
    wanted: dict[str, CheckpointTensor] = {}
    for path, module in model.named_modules():
        if isinstance(module, Loadable):
            wanted |= module.checkpoint_tensors(path)
    return wanted


def load_weights(
    model: nn.Module, path: str | Path, *, load_format: str = "auto", seed: int = 0
) -> None:
    """Fills every parameter of `model`.

    Args:
        path: directory with model.safetensors, or several files and their index; dummy reads none.
        load_format: auto reads the checkpoint; dummy makes the tensors, see `dummy_tensor`.
        seed: of the dummy tensors.

    Host memory beside the parameters is what is being read: at most READERS tensors, of READ_BYTES
    together or else one. Of a tensor that is split by rows the mapped file pages are this rank's
    rows; one that is split by columns is touched everywhere. A part whose dtype is not the
    parameter's is converted as it is copied, on a GPU by way of a second copy of that part.

    Raises:
        CheckpointError: no safetensors, a damaged file, a tensor missing, unknown, twice there, or
            of a wrong shape or dtype; nothing has been loaded then.
    """
    wanted = checkpoint_tensors(model)
    if load_format == "dummy":
        device = next(model.parameters()).device
        for name, tensor in wanted.items():
            tensor.fill(dummy_tensor(name, tensor.shape, seed, device))
        return
    sources = scan(Path(path))
    _check(Path(path), wanted, sources)
    budget = _Budget(READ_BYTES)

    def read(name: str) -> None:
        # Threads do not inherit the mode, in which parameters may have been made.
        with torch.inference_mode(), budget.hold(sources[name].bytes):
            wanted[name].fill(sources[name])

    with ThreadPoolExecutor(READERS, thread_name_prefix="weights") as pool:
        for _ in pool.map(read, wanted):
            pass  # raises what a reader raised; those not yet begun are cancelled


def dummy_tensor(
    name: str, shape: tuple[int, ...], seed: int, device: torch.device
) -> torch.Tensor:
    """The whole tensor `name` in float32, a function of (seed, name) and the kind of device alone,
    so that every TP size shards the same model. Normals of std 0.02; round 1 for a norm's weight.
    """
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    mean = 1.0 if name.endswith("norm.weight") else 0.0
    return torch.empty(shape, device=device).normal_(mean, DUMMY_STD, generator=generator)


class _Budget:
    """Bytes that readers hold at once; one that asks for more than all of it holds it alone."""

    def __init__(self, limit: int) -> None:
        self._limit = self._free = limit
        self._changed = threading.Condition()

    @contextmanager
    def hold(self, size: int) -> Iterator[None]:
        size = min(size, self._limit)
        with self._changed:
            self._changed.wait_for(lambda: size <= self._free)
            self._free -= size
        try:
            yield
        finally:
            with self._changed:
                self._free += size
                self._changed.notify_all()


def _check(path: Path, wanted: dict[str, CheckpointTensor], sources: dict[str, FileTensor]) -> None:
    _check_names(path, wanted, sources)
    for name, tensor in wanted.items():
        source = sources[name]
        if source.shape != tensor.shape:
            raise CheckpointError(
                f"{source.file}: {name}: the checkpoint has {list(source.shape)}, config.json asks "
                f"for {list(tensor.shape)}"
            )
        if source.dtype not in FLOATS:
            raise CheckpointError(
                f"{source.file}: {name}: dtype {source.dtype} is not one of {', '.join(FLOATS)}"
            )
    if HEAD in sources and HEAD not in wanted:
        _check_tied(sources[TABLE], sources[HEAD])


def _check_tied(table: FileTensor, head: FileTensor) -> None:
    """A tied checkpoint may repeat the table as LM head. Where the two differ, transformers 4 runs
    the one and transformers 5 the other, so neither is right unasked."""
    step = max(1, (64 << 20) * table.shape[0] // max(1, table.bytes))  # rows of 64 MiB
    same = (table.shape, table.dtype) == (head.shape, head.dtype) and all(
        torch.equal(table[i : i + step], head[i : i + step]) for i in range(0, table.shape[0], step)
    )
    if not same:
        raise CheckpointError(
            f"{head.file}: {head.name} is not {table.name}, but config.json ties the two: set "
            f"tie_word_embeddings to false, or remove {head.name}"
        )


def _check_names(path: Path, wanted: Iterable[str], found: Iterable[str]) -> None:
    wanted, found = set(wanted), set(found)
    missing = sorted(wanted - found)
    # Rotary buffers, which old checkpoints hold, are computed here.
    extra = sorted(
        name for name in found - wanted if name != HEAD and not name.endswith("rotary_emb.inv_freq")
    )
    if missing or extra:
        raise CheckpointError(
            f"{path}: its tensors do not fill this model: {listed(missing)} missing, "
            f"{listed(extra)} unknown; check config.json against the checkpoint"
        )
