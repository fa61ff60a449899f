"""What an engine leaves free on a GPU, and compile caches that engines of other settings share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams
from tests.gpu.conftest import HEADS
from tests.support.checkpoints import Checkpoints
from tests.support.greedy import greedy_reference

pytestmark = pytest.mark.gpu

SLACK = 256 << 20  # what libraries load and keep at their first use


def test_graphs_come_out_of_the_cache_and_not_out_of_what_is_left_alone(qwen3_0_6b: Path) -> None:
    """At 0.97 of the memory three hundredths stay free, after a full batch has been replayed, and a
    pair of graphs captured for one that asks for more; the cache is smaller for it."""
    total = torch.cuda.mem_get_info()[1]
    options: dict[str, Any] = {
        "memory_utilization": 0.97, "max_num_seqs": 64, "max_model_len": 4_096,
    }  # fmt: skip
    pages = []
    for eager in (True, False):
        with LLM(qwen3_0_6b, enforce_eager=eager, **options) as llm:
            pages.append(llm.effective["num_pages"])
            prompts = [[(i + n) % 1_000 for n in range(100)] for i in range(64)]
            for params in (
                SamplingParams(temperature=0, max_tokens=8, ignore_eos=True),
                SamplingParams(top_p=0.9, seed=0, max_tokens=8, ignore_eos=True, logprobs=2),
            ):
                outputs = llm.generate(prompts, params)
                assert {len(output.token_ids) for output in outputs} == {8}
            free = torch.cuda.mem_get_info()[0]
            memory = llm.memory()[0]
        assert memory["kv_bytes"] > total // 2
        assert free > 0.03 * total - SLACK
    assert pages[1] < pages[0]


def test_a_compile_cache_does_not_mind_the_order_of_settings(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """Three settings that compile differently, there and back in one cache: what one leaves must
    not be taken for another's. float32 tokens are transformers', whatever came before."""
    path = checkpoints(**HEADS)
    prompts = [[(7 * i + 3 * n) % 97 for i in range(n)] for n in (1, 7, 8, 9, 16, 29)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    settings: list[dict[str, Any]] = [
        {"compile": "model", "page_size": 8, "max_num_seqs": 8, "num_pages": 100},
        {"compile": "model", "page_size": 16, "max_num_seqs": 4, "max_num_batched_tokens": 16},
        {"compile": "layer", "page_size": 8, "enforce_eager": True, "attention": "triton"},
    ]
    common: dict[str, Any] = {"max_model_len": 64, "cache_dir": str(tmp_path)}
    for setting in (*settings, *reversed(settings)):
        with LLM(path, **{"attention": "sdpa", **common, **setting}) as llm:
            for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
                assert tuple(output.token_ids) == greedy_reference(path, tuple(prompt), 12), setting
