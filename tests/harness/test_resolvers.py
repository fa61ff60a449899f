"""What an experiment's machine-dependent values become."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from harness import resolvers


@pytest.mark.parametrize(
    ("gpus", "prompt", "batches", "tp"),
    [
        (0, 16, "1,4,16", "1,2"),
        (1, 128, "1,8,32", "1"),
        (2, 128, "1,8,32", "1,2"),
        (6, 128, "1,8,32", "1,2,4"),
        (16, 128, "1,8,32", "1,2,4,8"),
    ],
)
def test_values_follow_the_gpus(gpus: int, prompt: int, batches: str, tp: str) -> None:
    resolvers.register(gpus=gpus)
    cfg = OmegaConf.create(
        {
            "prompt": "${on_gpu:128,16}",
            "batch": '${on_gpu:"1,8,32","1,4,16"}',
            "tp": "${tp_sizes:}",
        }
    )
    assert OmegaConf.to_container(cfg, resolve=True) == {
        "prompt": prompt,
        "batch": batches,
        "tp": tp,
    }


@pytest.mark.parametrize(("tp", "comm"), [(1, "symm_mem"), (2, "nccl")])
def test_a_lever_of_several_ranks_is_none_of_one(tp: int, comm: str) -> None:
    resolvers.register(gpus=2)
    cfg = OmegaConf.create({"tp": tp, "comm": "${on_ranks:${tp},nccl,symm_mem}"})
    assert OmegaConf.to_container(cfg, resolve=True) == {"tp": tp, "comm": comm}
