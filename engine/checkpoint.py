"""The safetensors files of a checkpoint: which tensors they hold, read a part at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.errors import CheckpointError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # bytes by the dtype's name in safetensors


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor in a safetensors file; indexing reads what is asked for and no more."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        """Of the whole tensor, as stored."""
        return math.prod(self.shape) * FLOATS[self.dtype]

    def __getitem__(self, index: Any, /) -> torch.Tensor:
        """A view of the mapped file. Each call maps it anew, because a mapping keeps every page in
        memory that was ever touched: this one ends with the view."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.file, framework="pt") as opened:
                part: torch.Tensor = opened.get_slice(self.name)[index]
                return part
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.file}: cannot read {self.name} ({error})") from error


def scan(path: Path) -> dict[str, FileTensor]:
    """Every tensor of a checkpoint, by name; reads the files' headers only."""
    from safetensors import SafetensorError, safe_open

    sources: dict[str, FileTensor] = {}
    index = _index(path)
    for file in [path / SINGLE] if index is None else sorted({path / f for f in index.values()}):
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (no mapping)
                    if name in sources:
                        raise CheckpointError(
                            f"{path}: {name} is in more than one file, {sources[name].file.name} "
                            f"and {file.name}"
                        )
                    header = opened.get_slice(name)
                    shape = tuple(header.get_shape())
                    sources[name] = FileTensor(file, name, shape, header.get_dtype())
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: not a whole safetensors file ({error})") from error
    for name, holder in (index or {}).items():
        if name not in sources or sources[name].file != path / holder:
            raise CheckpointError(f"{path / INDEX}: {name} is not in {holder}, where it should be")
    return sources


def _index(path: Path) -> dict[str, str] | None:
    """File by tensor of a checkpoint in several files; None of one that is a single file, which is
    taken where both are there (transformers' order)."""
    single, index = path / SINGLE, path / INDEX
    if single.is_file():
        return None
    if not index.is_file():
        raise CheckpointError(
            f"{path} has neither {single.name} nor {index.name}: save the model as safetensors, or "
            f"use load_format=dummy"
        )
    try:
        files: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        absent = sorted({file for file in files.values() if not (path / file).is_file()})
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: not an index of safetensors files ({error})") from error
    if absent:
        lost = [name for name, file in files.items() if file in absent]
        raise CheckpointError(
            f"{path}: {index.name} names files that are not there: {absent}, for {listed(lost)}"
        )
    return files


def listed(names: Sequence[str], limit: int = 8) -> str:
    if not names:
        return "none"
    more = f", and {len(names) - limit} more" if len(names) > limit else ""
    return f"{len(names)} ({', '.join(names[:limit])}{more})"
