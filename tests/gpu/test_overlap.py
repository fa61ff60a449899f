"""The host a step ahead of the GPU: pinned inputs are used in turn and never written too early."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams
from engine.comm import CollectiveObserver, ObserverContext, StepInfo
from tests.gpu.conftest import HEADS
from tests.support.checkpoints import Checkpoints
from tests.support.greedy import greedy_reference

pytestmark = pytest.mark.gpu

OPTIONS: dict[str, Any] = {"page_size": 8, "attention": "sdpa", "max_model_len": 64,
                           "max_num_seqs": 8, "max_num_batched_tokens": 16,
                           "num_pages": 64}  # fmt: skip
SLOW_US = 300.0


class SlowGpu(CollectiveObserver):
    """A spin before every step, so that the host is always ahead."""

    def __init__(self, context: ObserverContext) -> None:
        from harness.observers.stamp_kernels import Spin

        self._spin = Spin(context.device)
        self._spin.set_ns(round(SLOW_US * 1e3))

    def step_begin(self, step: StepInfo) -> None:
        self._spin()


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize(
    "tp",
    [
        1,
        pytest.param(
            2,
            marks=pytest.mark.skipif(
                torch.cuda.device_count() < 2, reason="needs two CUDA devices"
            ),
        ),
    ],
)
def test_a_host_that_runs_ahead_overwrites_nothing(
    checkpoints: Checkpoints, eager: bool, tp: int
) -> None:
    """Batch sizes that change all the time, thousands of steps, the GPU slower than the host; in
    float32 the tokens are those of transformers."""
    path = checkpoints(**HEADS)
    rng = random.Random(5)
    prompts = [[rng.randrange(97) for _ in range(rng.randrange(1, 30))] for _ in range(24)]
    params = [
        SamplingParams(temperature=0, max_tokens=rng.randrange(1, 25), ignore_eos=True)
        for _ in prompts
    ]
    expected = [
        greedy_reference(path, tuple(p), s.max_tokens) for p, s in zip(prompts, params, strict=True)
    ]
    with LLM(path, tp=tp, enforce_eager=eager, **OPTIONS) as llm:
        assert llm.effective["overlap"] is True
        llm.attach([SlowGpu])
        steps = 0
        while steps < (300 if eager else 3_000):
            order = list(range(len(prompts)))
            rng.shuffle(order)
            outputs = llm.generate([prompts[i] for i in order], [params[i] for i in order])
            assert [tuple(o.token_ids) for o in outputs] == [expected[i] for i in order]
            steps += len(llm.drain_steps()[0])
        llm.detach()


def test_without_overlap_the_tokens_are_the_same(checkpoints: Checkpoints) -> None:
    path = checkpoints(dtype="bfloat16", hidden_size=64, max_position=1024, **HEADS)
    rng = random.Random(6)
    prompts = [[rng.randrange(97) for _ in range(20)] for _ in range(8)]
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=40) for i in range(8)]
    found = []
    for overlap in (True, False):
        with LLM(path, overlap=overlap, max_num_seqs=8, max_model_len=128, num_pages=64) as llm:
            found.append([o.token_ids for o in llm.generate(prompts, params)])
    assert found[0] == found[1]
