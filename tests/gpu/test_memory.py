"""What engines take of a GPU, leave free and give back; compile caches that settings share.

These read the memory of whole GPUs or fill it, so nothing else may run there.
"""

from __future__ import annotations

import gc
import random
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
        assert (memory["kv_bytes"] or 0) > total // 2
        assert free > 0.03 * total - SLACK
    assert pages[1] < pages[0]


def test_engines_return_their_memory(checkpoints: Checkpoints) -> None:
    path = checkpoints(dtype="bfloat16", hidden_size=64, max_position=1024, **HEADS)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    free = []
    for _ in range(3):
        with LLM(path, max_num_seqs=8, max_model_len=512, num_pages=512) as llm:
            llm.generate([[(7 * i + 3 * n) % 97 for i in range(9)] for n in range(3)], params)
        del llm
        gc.collect()
        torch.cuda.empty_cache()
        free.append(torch.cuda.mem_get_info()[0])
    assert abs(free[2] - free[1]) < 50 << 20


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


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_ranks_agree_on_the_smaller_cache_and_use_all_of_it(checkpoints: Checkpoints) -> None:
    """Some 4 GiB free on the first GPU and 3 on the second. More prompt tokens than the smaller
    cache holds touch its last page, since pages that nothing is kept in are taken first; one that
    the second rank does not have would be an illegal access there."""
    path = checkpoints(max_position=1_024, **HEADS)
    held = []
    for index, gib in ((0, 4), (1, 3)):
        free = torch.cuda.mem_get_info(index)[0]
        size = free - (gib << 30)
        held.append(torch.empty(size, dtype=torch.uint8, device=f"cuda:{index}"))
    options: dict[str, Any] = {
        "max_num_seqs": 8,
        "max_model_len": 1_024,
        "page_size": 256,
        "attention": "sdpa",
        "memory_utilization": 0.995,
    }
    with LLM(path, tp=2, enforce_eager=True, **options) as llm:
        memory = llm.memory()
        assert memory[0]["kv_bytes"] == memory[1]["kv_bytes"]
        assert llm.effective["num_pages"] > 100
        # Of 1,000 tokens each, three full pages and a part of one.
        count = llm.effective["num_pages"] // 4 + 9
        rng = random.Random(8)
        prompts = [[rng.randrange(97) for _ in range(1_000)] for _ in range(count)]
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        outputs = llm.generate(prompts, params)
    del held
    torch.cuda.empty_cache()
    assert {len(output.token_ids) for output in outputs} == {3}
    for prompt, output in zip(prompts[-9:], outputs[-9:], strict=True):
        assert tuple(output.token_ids) == greedy_reference(path, tuple(prompt), 3)
