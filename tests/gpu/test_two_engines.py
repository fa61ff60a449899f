"""Engines side by side in one process: on two GPUs, on one, and in pairs of ranks."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams
from engine.comm import CollectiveObserver, ObserverContext, StepInfo
from tests.gpu.conftest import HEADS
from tests.support.checkpoints import Checkpoints
from tests.support.greedy import greedy_reference

pytestmark = pytest.mark.gpu
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
four_gpus = pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four CUDA devices")

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS = [[(7 * i + 3 * n) % 97 for i in range(n)] for n in (1, 7, 8, 9, 16, 29)]
OPTIONS: dict[str, Any] = {
    "attention": "sdpa",
    "page_size": 8,
    "num_pages": 200,
    "max_num_seqs": 8,
    "max_model_len": 128,
}


def assert_greedy(llm: LLM) -> None:
    """float32 tokens are transformers', whoever else runs."""
    for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, GREEDY), strict=True):
        expected = greedy_reference(Path(llm.config.model), tuple(prompt), 24)
        assert tuple(output.token_ids) == expected


class SaysWhere(CollectiveObserver):
    """Its rank's device, the current one during its steps, and the thread they run on."""

    def __init__(self, context: ObserverContext) -> None:
        self.device = context.device
        self.seen: set[tuple[int, str]] = set()

    def step_begin(self, step: StepInfo) -> None:
        self.seen.add((torch.cuda.current_device(), threading.current_thread().name))

    def result(self) -> tuple[str, set[tuple[int, str]]]:
        return self.device, self.seen


@two_gpus
@pytest.mark.parametrize("eager", [True, False])
def test_two_gpus_in_one_process(checkpoints: Checkpoints, eager: bool) -> None:
    """Each engine stays on its GPU, graphs included, and the caller's current device on its own."""
    torch.cuda.set_device(0)
    path = checkpoints(**HEADS)
    taken = torch.cuda.memory_allocated(1)
    one = LLM(path, device="cuda", enforce_eager=eager, **OPTIONS)
    two = LLM(path, device="cuda:1", enforce_eager=eager, **OPTIONS)
    with one, two, ThreadPoolExecutor(4) as callers:
        assert torch.cuda.memory_allocated(1) > taken
        for llm in (one, two):
            llm.attach([SaysWhere])
            assert_greedy(llm)
        for _ in range(5):
            list(callers.map(assert_greedy, (one, two, one, two)))
        assert one.detach() == [[("cuda:0", {(0, "rangefinder-rank0")})]]
        assert two.detach() == [[("cuda:1", {(1, "rangefinder-rank0")})]]
        assert torch.cuda.current_device() == 0
        one.close()
        assert_greedy(two)


@pytest.mark.parametrize("eager", [True, False])
def test_two_engines_on_one_gpu(checkpoints: Checkpoints, eager: bool) -> None:
    """While one replays in its thread, another starts, captures, serves and ends in another."""
    path = checkpoints(**HEADS)
    with LLM(path, enforce_eager=eager, **OPTIONS) as one:
        assert_greedy(one)
        failures: list[BaseException] = []
        stop = threading.Event()

        def serve() -> None:
            try:
                while not stop.is_set():
                    assert_greedy(one)
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            for _ in range(3):
                with LLM(path, enforce_eager=eager, **OPTIONS) as two:
                    assert_greedy(two)
        finally:
            stop.set()
            thread.join()
        assert not failures


@two_gpus
def test_a_compile_cache_that_one_gpu_filled_serves_another(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """Code that was built for one device and is loaded on another would read the wrong memory."""
    path = checkpoints(**HEADS)
    for device in ("cuda:0", "cuda:1", "cuda:0"):
        with LLM(
            path, device=device, compile="model", cache_dir=str(tmp_path), **OPTIONS
        ) as compiled:
            assert_greedy(compiled)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rank0-gpu0", "rank0-gpu1"]


@two_gpus
def test_one_rank_beside_a_pair_of_ranks(checkpoints: Checkpoints) -> None:
    path = checkpoints(**HEADS)
    with (
        LLM(path, device="cuda:1", **OPTIONS) as one,
        LLM(path, tp=2, **OPTIONS) as pair,
        ThreadPoolExecutor(2) as callers,
    ):
        assert_greedy(one)
        for _ in range(3):
            list(callers.map(assert_greedy, (one, pair)))


@four_gpus
def test_two_pairs_of_ranks_on_four_gpus(checkpoints: Checkpoints) -> None:
    path = checkpoints(**HEADS)
    with (
        LLM(path, tp=2, **OPTIONS) as one,
        LLM(path, tp=2, device="cuda:2", **OPTIONS) as two,
        ThreadPoolExecutor(2) as callers,
    ):
        for llm in (one, two):
            llm.attach([SaysWhere])
            assert_greedy(llm)
        list(callers.map(assert_greedy, (one, two)))
        assert [rank[0][0] for rank in one.detach()] == ["cuda:0", "cuda:1"]
        assert [rank[0][0] for rank in two.detach()] == ["cuda:2", "cuda:3"]


def test_a_stream_over_replays_is_generate_in_pieces(checkpoints: Checkpoints) -> None:
    """With an abort, and samples that share a prompt, in the same batch."""
    path = checkpoints(**HEADS)
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True, n=3)
    with LLM(path, **OPTIONS) as llm:
        whole = llm.generate([PROMPTS[5], PROMPTS[4]], params)
        tokens: dict[tuple[int, int], list[int]] = {}
        stream = llm.stream([PROMPTS[5], PROMPTS[4]], params)
        for update in stream:
            tokens.setdefault((update.index, update.sample), []).extend(update.token_ids)
            if update.index == 1 and len(tokens[1, 0]) == 5:
                llm.abort(stream.request_ids[1])
        for sample in range(3):
            assert tokens[0, sample] == whole[0].samples[sample].token_ids
            begun = tokens[1, sample]
            assert 0 < len(begun) < 40
            assert begun == whole[1].samples[sample].token_ids[: len(begun)]
        assert [s.cached_tokens for s in whole[0].siblings] == [24, 24]
