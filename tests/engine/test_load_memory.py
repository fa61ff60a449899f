"""Host memory while a checkpoint of 154 MiB loads: the shard and what is being read, no more.

Peaks are the kernel's own (VmHWM), reset when imports and a first tiny load are done.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.checkpoint import INDEX, SINGLE
from engine.comm import SoloCommunicator
from engine.models import Qwen3ForCausalLM
from engine.shape import ModelShape
from engine.weights import checkpoint_tensors
from tests.support.checkpoints import Checkpoints
from tests.support.configs import QWEN3_8B

MIB = 1 << 20
SLACK = 8 * MIB  # stacks of four threads, headers, pages mapped round a part: some 3 MiB
CONFIG = {
    **QWEN3_8B, "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 4096, "vocab_size": 80_000,
    "tie_word_embeddings": True, "torch_dtype": "float32",
}  # fmt: skip
TABLE_BYTES = 80_000 * 256 * 4
MLP_BYTES = 4096 * 256 * 4

SCRIPT = """
import json, sys
import torch
from engine.models import Qwen3ForCausalLM
from engine.shape import ModelShape
from engine.weights import load_weights
from tests.support.models import LoneRank

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024

def load(path, rank, world, dtype):
    comm, dtype = LoneRank(rank, world), getattr(torch, dtype)
    model = Qwen3ForCausalLM(ModelShape.from_hf(path), comm, "sdpa", 64, dtype, "cpu")
    load_weights(model, path)
    return model

warm, path, rank, world, dtype = sys.argv[1:]
load(warm, 0, 1, "float32")
open("/proc/self/clear_refs", "w").write("5")
before = peak()
model = load(path, int(rank), int(world), dtype)
most = peak() - before
shard = sum(p.numel() * p.itemsize for p in model.parameters())
sums = [float(p.double().sum()) for p in (model.lm_head.weight, model.model.norm.weight)]
print(json.dumps({"peak": most, "shard": shard, "sums": sums}))
"""


@pytest.fixture(scope="module")
def tensors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """A tied model whose table is half of it; row i of a tensor holds i % 7."""
    path = tmp_path_factory.mktemp("shape")
    (path / "config.json").write_text(json.dumps(CONFIG))
    shape = ModelShape.from_hf(path)
    model = Qwen3ForCausalLM(shape, SoloCommunicator(), "sdpa", 64, torch.float32, "meta")
    made = {}
    for name, wanted in checkpoint_tensors(model).items():
        rows = torch.arange(wanted.shape[0]) % 7.0
        made[name] = rows.expand(*wanted.shape[1:], -1).movedim(-1, 0).contiguous()
    return made


def save(tensors: dict[str, torch.Tensor], path: Path, files: int) -> int:
    """Writes a checkpoint in so many files; -> their bytes."""
    (path / "config.json").write_text(json.dumps(CONFIG))
    parts = {f"model-{i}.safetensors": list(tensors)[i::files] for i in range(files)}
    if files == 1:
        parts = {SINGLE: list(tensors)}
    else:
        index = {"weight_map": {name: file for file, names in parts.items() for name in names}}
        (path / INDEX).write_text(json.dumps(index))
    for file, names in parts.items():
        save_file({name: tensors[name] for name in names}, path / file)
    return sum((path / file).stat().st_size for file in parts)


def measure(*arguments: Any) -> dict[str, Any]:
    try:
        Path("/proc/self/clear_refs").open("w").close()
    except OSError as error:
        pytest.skip(f"peak memory cannot be reset here: {error}")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, *map(str, arguments)],
        capture_output=True, text=True, check=True, env=environment,
    )  # fmt: skip
    measured: dict[str, Any] = json.loads(result.stdout)
    return measured


@pytest.mark.parametrize(
    ("world", "rank", "dtype", "files"),
    [(1, 0, "float32", 1), (1, 0, "bfloat16", 1), (2, 1, "float32", 1), (2, 0, "float32", 3)],
)
def test_peak_is_the_shard_and_what_is_being_read(
    checkpoints: Checkpoints,
    tensors: dict[str, torch.Tensor],
    tmp_path: Path,
    world: int,
    rank: int,
    dtype: str,
    files: int,
) -> None:
    """Four readers hold at most the rank's rows of the table and three matrices of the MLP (those
    split by columns whole). A whole checkpoint, or one dtype beside the other, would not fit."""
    total = save(tensors, tmp_path, files)
    assert total > 154 * MIB
    found = measure(checkpoints(), tmp_path, rank, world, dtype)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()  # pytest keeps the folder
    reading = TABLE_BYTES // world + 3 * MLP_BYTES
    limit = found["shard"] + reading + SLACK
    assert found["peak"] < limit < found["shard"] + total / world
    rows = (torch.arange(80_000) % 7).chunk(world)[rank]
    norm = torch.arange(256) % 7
    assert found["sums"] == [float(rows.sum()) * 256, float(norm.sum())]
