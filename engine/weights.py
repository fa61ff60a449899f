"""Checkpoint tensors -> this rank's parameters: each needed one exactly once, or an error.

A layer says which tensors of a checkpoint it takes, their whole shapes, and how it places its part
(`checkpoint_tensors`); the functions here read or make those tensors and hand them over one by one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from engine.errors import CheckpointError

DUMMY_STD = 0.02
_FLOATS = ("F64", "F32", "F16", "BF16")


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
        load_format: auto reads the checkpoint, of which no more than one rank's part of one tensor
            is in memory at a time; dummy makes the tensors, see `dummy_tensor`.
        seed: of the dummy tensors.

    Raises:
        CheckpointError: no safetensors, a tensor missing, unknown, twice there, or of a wrong shape
            or dtype. Nothing has been loaded when names do not match.
    """
    wanted = checkpoint_tensors(model)
    if load_format == "dummy":
        device = next(model.parameters()).device
        for name, tensor in wanted.items():
            tensor.fill(dummy_tensor(name, tensor.shape, seed, device))
        return
    with ExitStack() as stack:
        sources = _open_all(Path(path), stack)
        _check_names(Path(path), wanted, sources)
        for name, tensor in wanted.items():
            source = sources[name]
            if tuple(source.shape) != tensor.shape:
                raise CheckpointError(
                    f"{name}: the checkpoint has {list(source.shape)}, config.json asks for "
                    f"{list(tensor.shape)}"
                )
            if source.dtype not in _FLOATS:
                raise CheckpointError(f"{name}: dtype {source.dtype} is not one of {_FLOATS}")
            tensor.fill(source)


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


class _FileTensor:
    """A tensor inside an open safetensors file; indexing reads only what is asked for."""

    def __init__(self, file: Any, name: str) -> None:
        self._slice = file.get_slice(name)
        self.shape: tuple[int, ...] = tuple(self._slice.get_shape())
        self.dtype: str = self._slice.get_dtype()

    def __getitem__(self, index: Any, /) -> torch.Tensor:
        return self._slice[index]


def _open_all(path: Path, stack: ExitStack) -> dict[str, _FileTensor]:
    from safetensors import SafetensorError, safe_open

    sources: dict[str, _FileTensor] = {}
    for file in _files(path):
        try:
            opened = stack.enter_context(safe_open(file, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: not a whole safetensors file ({error})") from error
        for name in opened.keys():  # noqa: SIM118 (no mapping)
            if name in sources:
                raise CheckpointError(f"{path}: {name} is in more than one file")
            sources[name] = _FileTensor(opened, name)
    return sources


def _files(path: Path) -> list[Path]:
    """model.safetensors, else the files that the index names (transformers' order)."""
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise CheckpointError(
            f"{path} has neither {single.name} nor {index.name}: save the model as safetensors, or "
            f"use load_format=dummy"
        )
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: not an index of safetensors files ({error})") from error
    absent = [name for name in names if not (path / name).is_file()]
    if absent:
        raise CheckpointError(f"{path}: {index.name} names files that are not there: {absent}")
    return [path / name for name in names]


def _check_names(path: Path, wanted: Iterable[str], found: Iterable[str]) -> None:
    wanted, found = set(wanted), set(found)
    missing = sorted(wanted - found)
    # A tied checkpoint may repeat the table as lm_head.weight; rotary buffers are computed here.
    extra = sorted(
        name
        for name in found - wanted
        if name != "lm_head.weight" and not name.endswith("rotary_emb.inv_freq")
    )
    if missing or extra:
        raise CheckpointError(
            f"{path}: its tensors do not fill this model: {_listed(missing)} missing, "
            f"{_listed(extra)} unknown; check config.json against the checkpoint"
        )


def _listed(names: Sequence[str], limit: int = 8) -> str:
    if not names:
        return "none"
    more = f", and {len(names) - limit} more" if len(names) > limit else ""
    return f"{len(names)} ({', '.join(names[:limit])}{more})"
