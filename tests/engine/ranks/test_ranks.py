"""Ranks as processes over gloo: tokens of transformers, observers, deaths, shutdown."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from engine import LLM, EngineDeadError, FinishReason, Kind, SamplingParams, Site
from engine.comm import Collective, CollectiveObserver, ObserverContext, StepInfo
from engine.errors import CheckpointError
from tests.support.checkpoints import Checkpoints
from tests.support.greedy import greedy_reference
from tests.support.pids import assert_gone, rank_pids

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LAYERS = 3


def prompts() -> list[list[int]]:
    return [[(7 * i + 3 * n) % 97 for i in range(n)] for n in (1, 7, 8, 9, 16, 29)]


class Recorder(CollectiveObserver):
    """Keeps every collective of every step on its rank."""

    def __init__(self, context: ObserverContext) -> None:
        self.rank = context.rank
        self.steps: list[StepInfo] = []
        self.collectives: list[Collective] = []

    def step_begin(self, step: StepInfo) -> None:
        self.steps.append(step)

    def after(self, collective: Collective) -> None:
        self.collectives.append(collective)

    def result(self) -> tuple[list[StepInfo], list[Collective]]:
        return self.steps, self.collectives


class RaisesInStepFive(Recorder):
    """On rank 1 alone, before the third collective of the fifth step it sees."""

    def before(self, collective: Collective) -> None:
        if self.rank == 1 and len(self.steps) == 5 and collective.ordinal == 2:
            raise RuntimeError("planted in rank 1")


def engine(path: Path, **options: Any) -> LLM:
    defaults: dict[str, Any] = {"enforce_eager": True, "page_size": 8, "device": "cpu", "tp": 2}
    return LLM(path, **{**defaults, "threads_per_rank": 1, **options})


@pytest.fixture(scope="module")
def two_ranks(checkpoints: Checkpoints) -> Iterator[LLM]:
    with engine(checkpoints(), max_num_batched_tokens=20, max_num_seqs=4, num_pages=16) as llm:
        yield llm


def assert_greedy(llm: LLM) -> None:
    for prompt, output in zip(prompts(), llm.generate(prompts(), GREEDY), strict=True):
        expected = greedy_reference(Path(llm.config.model), tuple(prompt), 12)
        assert tuple(output.token_ids) == expected, f"prompt of {len(prompt)} tokens"


def test_tokens_are_transformers_through_chunks_preemption_and_warm_prefixes(
    two_ranks: LLM,
) -> None:
    assert_greedy(two_ranks)
    assert_greedy(two_ranks)
    counters = two_ranks.counters()
    assert counters["cached_tokens"] > 0
    assert two_ranks.effective["comm"] == "gloo"


def test_every_rank_hears_the_same_collectives(two_ranks: LLM) -> None:
    two_ranks.reset_prefix_cache()
    two_ranks.attach([Recorder])
    two_ranks.generate([list(range(25))], GREEDY)  # chunks of 20 and 5, then 11 decode steps
    ((steps, collectives),), ((steps1, collectives1),) = two_ranks.detach()
    assert steps == steps1
    assert [s.tokens for s in steps] == [20, 5] + [1] * 11
    assert [s.samples for s in steps] == [0] + [1] * 12

    def seen_by_all(c: Collective) -> tuple[Any, ...]:
        return (c.step, c.ordinal, c.kind, c.site, c.bytes, c.dtype, c.world, c.path)

    assert list(map(seen_by_all, collectives)) == list(map(seen_by_all, collectives1))
    hidden = 24 * 4  # bytes of one token's hidden state in float32
    body = [(Kind.ALL_REDUCE, Site.EMBED)] + [
        (Kind.ALL_REDUCE, site) for _ in range(LAYERS) for site in (Site(1), Site(2))
    ]
    tail = [(Kind.GATHER, Site.LM_HEAD), (Kind.BROADCAST, Site.TOKEN_IDS)]
    for step in steps:
        own = [c for c in collectives if c.step == step.step]
        assert [c.ordinal for c in own] == list(range(len(own)))
        assert [(c.kind, c.site) for c in own] == body + (tail if step.samples else [])
        assert {c.bytes for c in own if c.kind is Kind.ALL_REDUCE} == {step.tokens * hidden}
    # 97 rows of vocabulary are padded to 98 over two ranks; ids are int64.
    gathers = Counter(c.bytes for c in collectives if c.kind is Kind.GATHER)
    assert gathers == {98 * 4: 12}
    assert Counter(c.bytes for c in collectives if c.kind is Kind.BROADCAST) == {8: 12}
    assert {c.path for c in collectives} == {"gloo"}


def test_a_bad_request_fails_alone(two_ranks: LLM) -> None:
    good = prompts()[3]
    outputs = two_ranks.generate([good, [1] * 200, [96, 97]], GREEDY)
    assert tuple(outputs[0].token_ids) == greedy_reference(
        Path(two_ranks.config.model), tuple(good), 12
    )
    assert [o.finish_reason for o in outputs[1:]] == [FinishReason.ERROR] * 2


def test_an_interrupted_call_leaves_the_engine_usable(two_ranks: LLM) -> None:
    long = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
    with pytest.raises(KeyboardInterrupt):
        threading.Timer(0.1, signal.raise_signal, (signal.SIGINT,)).start()
        for _ in range(1000):
            two_ranks.generate(prompts()[:2], long)
    assert_greedy(two_ranks)


@pytest.mark.parametrize(
    "variant",
    [
        {"tied": True, "attention_bias": True},
        {"num_kv_heads": 4, "max_shard_size": "8KB"},
        {"tied": True, "num_kv_heads": 1},
        {"model_type": "qwen2", "hidden_size": 64, "num_kv_heads": 1},
    ],
)
def test_tokens_of_other_checkpoints_are_transformers(
    checkpoints: Checkpoints, variant: dict[str, Any]
) -> None:
    with engine(checkpoints(**variant)) as llm:
        assert_greedy(llm)


def test_four_ranks_replicate_two_kv_heads(checkpoints: Checkpoints) -> None:
    with engine(checkpoints(attention_bias=True), tp=4) as llm:
        assert_greedy(llm)
        pids = rank_pids(llm)
        memory = llm.memory()
    assert_gone(pids)
    assert len({m["kv_bytes"] for m in memory}) == 1


def test_a_rank_that_raises_is_named_and_nothing_stays(checkpoints: Checkpoints) -> None:
    llm = engine(checkpoints())
    pids = rank_pids(llm)
    llm.attach([RaisesInStepFive])
    begin = time.monotonic()
    with pytest.raises(EngineDeadError, match="planted in rank 1") as caught:
        llm.generate(prompts(), GREEDY)
    assert time.monotonic() - begin < 60
    assert caught.value.rank == 1 and "RuntimeError" in caught.value.worker_traceback
    assert_gone(pids)
    with pytest.raises(EngineDeadError, match="planted in rank 1"):
        llm.generate(prompts(), GREEDY)
    llm.close()
    llm.close()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_named_and_nothing_stays(checkpoints: Checkpoints, victim: int) -> None:
    llm = engine(checkpoints())
    pids = rank_pids(llm)
    timer = threading.Timer(0.2, os.kill, (pids[victim], signal.SIGKILL))
    timer.start()
    begin = time.monotonic()
    with pytest.raises(EngineDeadError) as caught:
        for _ in range(1000):
            llm.generate(prompts(), GREEDY)
    assert time.monotonic() - begin < 60
    assert (caught.value.rank, caught.value.exitcode) == (victim, -signal.SIGKILL)
    assert_gone(pids)
    llm.close()


def test_errors_of_a_checkpoint_reach_the_caller_as_they_are(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_bytes((checkpoints() / name).read_bytes())
    with pytest.raises(CheckpointError, match="safetensors"):
        engine(tmp_path)


def test_ranks_end_with_their_caller(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """SIGKILL of the caller in the middle of a call: its ranks see the closed pipe and end."""
    script = f"""
from engine import LLM, SamplingParams
from tests.support.pids import TellsItsProcess
if __name__ == "__main__":
    llm = LLM({str(checkpoints())!r}, tp=2, enforce_eager=True, device="cpu", threads_per_rank=1)
    llm.attach([TellsItsProcess])
    print(*[observers[0] for observers in llm.detach()], flush=True)
    while True:
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=50, ignore_eos=True))
"""
    path = tmp_path / "caller.py"
    path.write_text(script)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    caller = subprocess.Popen(
        [sys.executable, path], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert caller.stdout is not None
    pids = [int(pid) for pid in caller.stdout.readline().split()]
    assert len(pids) == 2
    time.sleep(0.3)
    caller.kill()
    caller.wait()
    assert_gone(pids)
    caller.stdout.close()


@pytest.mark.parametrize("after_s", [0.05, 1.0])
def test_an_interrupt_while_starting_leaves_no_rank(
    checkpoints: Checkpoints, after_s: float
) -> None:
    path = checkpoints()
    before = {child.pid for child in multiprocessing.active_children()}
    with pytest.raises(KeyboardInterrupt):
        threading.Timer(after_s, signal.raise_signal, (signal.SIGINT,)).start()
        engine(path).close()
        time.sleep(10)  # the engine was faster than the interrupt
    assert {child.pid for child in multiprocessing.active_children()} <= before


def test_an_interrupt_before_the_threads_of_the_pipes_start_leaves_no_rank(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        if thread.name == "rangefinder-writer":
            raise KeyboardInterrupt
        start(thread)

    path, before = checkpoints(), {child.pid for child in multiprocessing.active_children()}
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine(path)
    assert {child.pid for child in multiprocessing.active_children()} <= before


def test_threads_share_two_ranks(two_ranks: LLM) -> None:
    with ThreadPoolExecutor(3) as threads:
        for _ in range(3):
            found = threads.map(lambda prompt: two_ranks.generate([prompt], GREEDY)[0], prompts())
            for prompt, output in zip(prompts(), found, strict=True):
                expected = greedy_reference(Path(two_ranks.config.model), tuple(prompt), 12)
                assert tuple(output.token_ids) == expected


def test_four_engines_start_at_once(checkpoints: Checkpoints) -> None:
    path = checkpoints()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            with engine(path) as llm:
                assert_greedy(llm)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
