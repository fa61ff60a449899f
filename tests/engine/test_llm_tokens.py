"""LLM at tp=1 against transformers: tokens in any batch, chunks, pages, and compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine import SamplingParams
from tests.support.checkpoints import Checkpoints
from tests.support.engines import small_engine as engine
from tests.support.greedy import GREEDY, assert_greedy
from tests.support.prompts import LENGTHS, PAGE, prompts_of


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_greedy_tokens_are_transformers(
    checkpoints: Checkpoints, tied: bool, bias: bool, kv_heads: int
) -> None:
    path = checkpoints(tied=tied, attention_bias=bias, num_kv_heads=kv_heads)
    with engine(path) as llm:
        assert_greedy(path, llm, prompts_of(LENGTHS))


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_any_page_size(checkpoints: Checkpoints, page_size: int) -> None:
    path = checkpoints()
    with engine(path, page_size=page_size) as llm:
        assert_greedy(path, llm, prompts_of(LENGTHS))


@pytest.mark.parametrize("budget", [3, 8, 11, 40])
def test_any_chunk_budget(checkpoints: Checkpoints, budget: int) -> None:
    path = checkpoints()
    with engine(path, max_num_batched_tokens=budget, max_num_seqs=3) as llm:
        assert_greedy(path, llm, prompts_of(LENGTHS))


def test_the_batch_does_not_change_a_row(checkpoints: Checkpoints) -> None:
    path = checkpoints()
    prompts = prompts_of(LENGTHS)
    with engine(path) as llm:
        for prompt in prompts:
            assert_greedy(path, llm, [prompt])
        assert_greedy(path, llm, prompts[::-1])


@pytest.mark.parametrize(
    "length", [PAGE - 1, PAGE, PAGE + 1, 2 * PAGE - 1, 2 * PAGE, 2 * PAGE + 1, 3 * PAGE]
)
def test_a_warm_prefix_gives_the_tokens_of_a_cold_one(
    checkpoints: Checkpoints, length: int
) -> None:
    path = checkpoints()
    prompt = prompts_of((length,))[0]
    # At least one token is computed, so a prompt of n whole pages reuses n - 1.
    cached = (length - 1) // PAGE * PAGE
    with engine(path) as llm:
        cold = llm.generate([prompt], GREEDY)[0]
        assert_greedy(path, llm, [prompt])
        warm = llm.generate([prompt], GREEDY)[0]
        assert (cold.cached_tokens, warm.cached_tokens) == (0, cached)
        assert llm.counters()["cached_tokens"] == 2 * cached
        llm.reset_prefix_cache()
        assert llm.generate([prompt], GREEDY)[0].cached_tokens == 0


def test_preempted_requests_end_with_the_same_tokens(checkpoints: Checkpoints) -> None:
    path = checkpoints()
    shared = prompts_of((2 * PAGE,))[0]
    prompts = [shared + tail for tail in prompts_of((3, 5, 7, 9, 2, 6), seed=1)]
    # Each needs 4 to 5 pages at its end, so 9 pages cannot hold three of them.
    with engine(path, num_pages=9, prefix_cache=False) as llm:
        assert_greedy(path, llm, prompts)
        assert llm.counters()["preemptions"] > 0
    with engine(path, num_pages=9) as llm:
        assert_greedy(path, llm, prompts)


def test_seeded_noise_does_not_depend_on_the_batch(checkpoints: Checkpoints) -> None:
    path = checkpoints()
    prompts = prompts_of((5, 9, 14))
    params = [SamplingParams(temperature=0.9, seed=s, max_tokens=10) for s in (1, 2, 3)]
    with engine(path) as llm:
        together = [o.token_ids for o in llm.generate(prompts, params)]
        alone = [llm.generate([p], s)[0].token_ids for p, s in zip(prompts, params, strict=True)]
        other = llm.generate(prompts[:1], SamplingParams(temperature=0.9, seed=9, max_tokens=10))
    with engine(path, max_num_batched_tokens=4, max_num_seqs=3) as llm:
        chunked = [o.token_ids for o in llm.generate(prompts, params)]
    assert together == alone == chunked
    assert other[0].token_ids != together[0]


def test_compiled_tokens_are_transformers_whatever_the_cache_holds(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """What other settings left in the compile cache is not taken for this one's."""
    path = checkpoints(num_layers=2)
    hits = []
    for scope, page_size in (("layer", 8), ("model", 4), ("layer", 8)):
        options: dict[str, Any] = {
            "compile": scope, "cache_dir": str(tmp_path), "page_size": page_size,
            "max_num_batched_tokens": 16, "max_num_seqs": 4,  # so that some steps use all of it
        }  # fmt: skip
        with engine(path, **options) as llm:
            before = llm.counters()
            assert before["compiles"] == (2 if scope == "model" else 4)
            assert before["graph_breaks"] == 0
            hits.append(before["cache_hits"])
            assert_greedy(path, llm, prompts_of(LENGTHS))
            assert 16 in llm.drain_steps()[0]["tokens"]
            # Every token count of the run is served by what warm-up compiled.
            assert llm.counters()["compiles"] == before["compiles"]
            assert llm.effective["mode"] == f"compiled-{scope}"
    assert hits[0] < hits[2]
    assert (tmp_path / "rank0" / "inductor").is_dir()
