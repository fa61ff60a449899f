from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from harness.machine.models import with_weights
from tests.support.checkpoints import Checkpoints
from tests.support.numerics import logits_by_transformers
from tests.support.once import one_at_a_time

# Attention sizes of every published Qwen3 (flash-attn is often built for head_dim 128 alone).
HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 128}
THREADS = 4


@pytest.fixture(scope="module", autouse=True)
def few_threads() -> Iterator[None]:
    """References are computed and code is compiled by a few threads, here and in the ranks that are
    started here. torch takes all cores for each process: thirteen on 32 cores had finished no test
    after 225 s."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(before, THREADS))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
            patch.setenv(name, os.environ.get(name, str(THREADS)))
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session")
def qwen3_0_6b() -> Path:
    """The 0.6B shape in bf16 with normals of 0.02, saved by transformers; of all processes."""
    with one_at_a_time("test-weights"):
        return with_weights({"name": "qwen3-0.6b", "path": None, "load_format": "dummy"})


@pytest.fixture(scope="session")
def references(qwen3_0_6b: Path) -> dict[str, torch.Tensor]:
    """Logits [SEQUENCES, DECODES + 1, V] by transformers, from position PROMPT - 1."""
    return logits_by_transformers(qwen3_0_6b)


@pytest.fixture(scope="module")
def compile_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared by a file's cases: most of them compile the same code."""
    return tmp_path_factory.mktemp("compile-cache")
