"""Pages that ranks share: how many there are, and what a preempted sequence brings along."""

from __future__ import annotations

import multiprocessing
import queue
import threading
from typing import Any

from engine import EngineConfig, FinishReason, ModelShape, SamplingParams
from engine.comm import Communicator
from engine.comm.process_group import ProcessGroupCommunicator
from engine.core import EngineCore
from engine.execution.runner import Runner
from engine.requests.request import Request
from engine.resolve import resolve
from engine.scheduling.step import StepPlan
from tests.support.checkpoints import Checkpoints
from tests.support.engines import small_engine
from tests.support.greedy import greedy_reference
from tests.support.rank_processes import run_processes
from tests.support.threads import run_ranks


def test_a_preempted_sequence_brings_its_tokens_to_every_rank(checkpoints: Checkpoints) -> None:
    """Each prompt is computed in one step, which samples, so whoever is preempted has generated;
    told the last token alone, ranks would recompute another sequence."""
    path = checkpoints()
    prompts = [[(7 * i + 3 * n) % 97 for i in range(n)] for n in (6, 7, 5, 8)]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    options: dict[str, Any] = {"num_pages": 9, "page_size": 4, "prefix_cache": False}
    with small_engine(path, tp=2, **options) as llm:
        outputs = llm.generate(prompts, params)
        (steps, _) = llm.drain_steps()
    assert sum(output.preemptions for output in outputs) >= 3
    assert sum(steps["samples"]) == sum(len(output.token_ids) for output in outputs) == 80
    for prompt, output in zip(prompts, outputs, strict=True):
        assert tuple(output.token_ids) == greedy_reference(path, tuple(prompt), 20)


def test_ranks_take_the_fewest_pages_and_use_the_last_of_them(checkpoints: Checkpoints) -> None:
    """Room for 9 pages on rank 0 and for 5 on rank 1: a page that only one rank had would be
    written outside of the other's cache."""
    path, shape = checkpoints(), ModelShape.from_hf(checkpoints())
    room, together = [9, 5], threading.Barrier(2)
    plans: queue.Queue[bytes | None] = queue.Queue()
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompts = [[(5 * i + n) % 97 for i in range(33)] for n in range(2)]
    requests = [Request(str(i), list(p), params, 0, 0.0) for i, p in enumerate(prompts)]
    requests.append(Request("large", [1] * 34, params, 0, 0.0))

    def fewest(pages: int) -> int:
        together.wait()
        return min(room)

    def on_rank(comm: Communicator) -> tuple[int, int]:
        config = EngineConfig(
            model=str(path), tp=2, device="cpu", enforce_eager=True, page_size=8,
            num_pages=room[comm.rank],
        )  # fmt: skip
        runner = Runner(resolve(config, shape), shape, comm, agree=fewest)
        if comm.rank == 0:
            core = EngineCore(runner, lambda plan: plans.put(plan.to_bytes()))
            for request in requests:
                core.add(request)
            while core.has_work:
                core.step()
            plans.put(None)
        else:
            while (message := plans.get()) is not None:
                runner.launch(StepPlan.from_bytes(message))
        written = [bool(k[4].any()) for k, _ in runner.kv_cache.layers]
        assert written == [True] * 3  # of pages 0 to 4, the last
        return runner.kv_cache.num_pages, len(runner.kv_cache.layers[0][0])

    assert run_ranks(2, on_rank) == [(5, 6)] * 2  # and the dummy page
    for request, prompt in zip(requests, prompts, strict=False):
        assert tuple(request.output_ids) == greedy_reference(path, tuple(prompt), 8)
    assert requests[2].finish_reason is FinishReason.ERROR
    assert "needs 6 pages of 8 tokens, but the K/V cache has 5" in str(requests[2].error)


def _say_the_fewest(rank: int, port: int, found: Any) -> None:
    comm = ProcessGroupCommunicator(rank, 2, "gloo", port)
    found.put((rank, comm.min_over_ranks((2111, 2055)[rank])))
    comm.barrier()
    comm.close()


def test_processes_agree_on_the_smallest_number() -> None:
    found = multiprocessing.get_context("spawn").Queue()
    run_processes(_say_the_fewest, found)
    assert sorted(found.get(timeout=60) for _ in range(2)) == [(0, 2055), (1, 2055)]
