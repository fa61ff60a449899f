"""LLM in use: its log of steps, observers, interrupts, several engines, threads, closing."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from engine.comm import Collective, CollectiveObserver, ObserverContext, StepInfo
from engine.comm.ops import _registry
from tests.support.checkpoints import Checkpoints
from tests.support.engines import small_engine as engine
from tests.support.greedy import GREEDY, assert_greedy, greedy_reference
from tests.support.prompts import LENGTHS, prompts_of


def test_steps_are_logged_once(checkpoints: Checkpoints) -> None:
    with engine(checkpoints(), max_num_batched_tokens=10, max_num_seqs=4) as llm:
        llm.generate(prompts_of((25,)), GREEDY)
        (steps,) = llm.drain_steps()
        assert steps["tokens"].tolist() == [10, 10, 5] + [1] * 11
        assert steps["samples"].tolist() == [0, 0] + [1] * 12
        assert steps["phase"].tolist() == [0, 0, 0] + [1] * 11
        assert steps["step"].tolist() == list(range(14))
        assert (steps["wall_begin_ns"] <= steps["begin_ns"]).all()
        assert (steps["begin_ns"] < steps["end_ns"]).all()
        assert (steps["end_ns"] <= steps["wall_end_ns"]).all()
        assert len(llm.drain_steps()[0]) == 0


class Listener(CollectiveObserver):
    """Counts what it hears."""

    def __init__(self, context: ObserverContext) -> None:
        self.heard: list[Any] = [(context.rank, context.world, context.device)]

    def step_begin(self, step: StepInfo) -> None:
        self.heard.append(step)

    def before(self, collective: Collective) -> None:
        self.heard.append(collective)

    def result(self) -> list[Any]:
        return self.heard


class Interrupts(Listener):
    """Ctrl-C in the middle of the third step."""

    def step_end(self, step: StepInfo) -> None:
        if len(self.heard) == 4:
            raise KeyboardInterrupt


def test_an_interrupted_call_leaves_the_engine_usable(checkpoints: Checkpoints) -> None:
    path = checkpoints()
    prompts = prompts_of(LENGTHS)
    with engine(path) as llm:
        llm.attach([Interrupts])
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompts, GREEDY)
        llm.detach()
        assert_greedy(path, llm, prompts)
        assert llm.counters()["cached_tokens"] == 0  # nothing of the interrupted step is trusted


def test_one_rank_has_steps_and_no_collectives(checkpoints: Checkpoints) -> None:
    with engine(checkpoints()) as llm:
        llm.attach([Listener])
        llm.generate(prompts_of((5,)), GREEDY)
        ((heard,),) = llm.detach()
        llm.generate(prompts_of((5,)), GREEDY)
    assert heard[0] == (0, 1, "cpu")
    assert [type(h) for h in heard[1:]] == [StepInfo] * 12
    assert [h.phase.value for h in heard[1:]] == ["prefill"] + ["decode"] * 11


def test_engines_one_after_the_other_leave_nothing(checkpoints: Checkpoints) -> None:
    path = checkpoints()
    prompts = prompts_of(LENGTHS)
    before = set(_registry)
    for page_size in (4, 8, 16):
        llm = engine(path, page_size=page_size)
        assert_greedy(path, llm, prompts)
        llm.close()
        llm.close()
        assert set(_registry) == before
    first, second = engine(path), engine(path, page_size=4)  # and two at once
    assert_greedy(path, first, prompts)
    assert_greedy(path, second, prompts)
    first.close()
    assert_greedy(path, second, prompts)
    second.close()


def test_a_closed_engine_says_so(checkpoints: Checkpoints) -> None:
    llm = engine(checkpoints())
    llm.close()
    for call in (lambda: llm.generate([[1]], GREEDY), llm.counters, llm.drain_steps):
        with pytest.raises(RuntimeError, match="the engine is closed"):
            call()


def test_calls_from_two_threads_are_both_served(checkpoints: Checkpoints) -> None:
    path = checkpoints()
    prompts = prompts_of((5, 9))
    with engine(path) as llm, ThreadPoolExecutor(2) as threads:
        for _ in range(5):
            found = threads.map(lambda prompt: llm.generate([prompt], GREEDY)[0], prompts)
            for prompt, output in zip(prompts, found, strict=True):
                assert tuple(output.token_ids) == greedy_reference(path, tuple(prompt), 12)
