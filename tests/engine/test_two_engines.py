"""Several engines at once in one process: threads, folders, registry, processes."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from engine import LLM, ConfigError, EngineConfig, ModelShape, SamplingParams, SoloCommunicator
from engine.comm import CollectiveObserver, ObserverContext, StepInfo
from engine.comm.ops import _registry, communicators
from engine.resolve import resolve
from tests.support.checkpoints import Checkpoints
from tests.support.engines import assert_idle, small_engine
from tests.support.greedy import greedy_reference

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[(7 * i + 3 * n) % 97 for i in range(n)] for n in (1, 7, 8, 9, 16, 29)]


def assert_greedy(llm: LLM) -> None:
    outputs = llm.generate(PROMPTS, GREEDY)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        path = Path(llm.config.model)
        assert tuple(output.token_ids) == greedy_reference(path, tuple(prompt), 12)


class CountsThreads(CollectiveObserver):
    """How many intra-op threads its rank's steps have, and which thread they run on."""

    def __init__(self, context: ObserverContext) -> None:
        self.seen: set[tuple[int, str]] = set()

    def step_begin(self, step: StepInfo) -> None:
        self.seen.add((torch.get_num_threads(), threading.current_thread().name))

    def result(self) -> set[tuple[int, str]]:
        return self.seen


def test_two_at_once_keep_their_threads_and_leave_the_callers(checkpoints: Checkpoints) -> None:
    """Two engines of different models, thread counts and page sizes, each driven by two threads."""
    before = torch.get_num_threads()
    one = small_engine(checkpoints(), threads_per_rank=2)
    two = small_engine(checkpoints(tied=True, num_kv_heads=1), threads_per_rank=3, page_size=4)
    with one, two, ThreadPoolExecutor(4) as callers:
        for llm in (one, two):
            llm.attach([CountsThreads])
            assert_greedy(llm)  # and the reference is there before threads ask for it
        for _ in range(3):
            list(callers.map(assert_greedy, (one, two, one, two)))
        assert one.detach() == [[{(2, "rangefinder-rank0")}]]
        assert two.detach() == [[{(3, "rangefinder-rank0")}]]
        assert torch.get_num_threads() == before
        later: list[int] = []  # a thread that comes while they live
        thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert later == [before]
        one.close()
        assert_greedy(two)
    assert torch.get_num_threads() == before


def test_two_groups_of_two_processes_at_once(checkpoints: Checkpoints) -> None:
    path = checkpoints()
    with (
        small_engine(path, tp=2) as one,
        small_engine(path, tp=2) as two,
        ThreadPoolExecutor(2) as callers,
    ):
        assert_greedy(one)
        list(callers.map(assert_greedy, (one, two)))
        one.close()
        assert_greedy(two)


def test_only_one_may_have_a_compile_cache_of_its_own(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "mine")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    path, registered = checkpoints(), set(_registry)
    first = small_engine(path, cache_dir=str(tmp_path / "a"))
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "a" / "rank0" / "triton")
    with pytest.raises(ConfigError, match=r"cache_dir='.*b': another .* has cache_dir='.*a'"):
        small_engine(path, cache_dir=str(tmp_path / "b"))
    assert len(set(_registry) - registered) == 1
    with small_engine(path) as second:  # one without is no conflict, and changes nothing
        assert_greedy(second)
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "a" / "rank0" / "triton")
    first.close()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "mine"
    assert "TRITON_CACHE_DIR" not in os.environ
    with small_engine(path, cache_dir=str(tmp_path / "b")) as third:
        assert_greedy(third)
    assert set(_registry) == registered


def test_keys_taken_by_many_threads_are_different() -> None:
    before = set(_registry)
    start = threading.Barrier(8)

    def take() -> list[SoloCommunicator]:
        start.wait()
        return [SoloCommunicator() for _ in range(50)]

    with ThreadPoolExecutor(8) as threads:
        futures = [threads.submit(take) for _ in range(8)]
        taken = [comm for future in futures for comm in future.result()]
    assert len({comm.key for comm in taken}) == 400
    assert set(taken) <= set(communicators())
    free = taken[200].key
    for comm in taken[200], taken[200]:
        comm.close()
    again = SoloCommunicator()
    assert again.key == free  # the lowest that is free
    for comm in [*taken, again]:
        comm.close()
    assert set(_registry) == before


@pytest.mark.parametrize("tp", [1, 2])
def test_an_engine_that_nobody_closes_goes_with_its_last_reference(
    checkpoints: Checkpoints, tp: int
) -> None:
    def threads() -> set[threading.Thread]:
        return {t for t in threading.enumerate() if t.name.startswith("rangefinder")}

    registered, before = set(_registry), threads()
    llm = small_engine(checkpoints(), tp=tp)
    stream = llm.stream([1], GREEDY)
    next(stream)
    gone = weakref.ref(llm)
    del llm
    gc.collect()
    assert gone() is None
    assert sum(len(update.token_ids) for update in stream) == 11  # a stream keeps its engine
    del stream
    gc.collect()
    deadline = time.monotonic() + 60  # the engine's thread may be the one to let it go
    while left := threads() - before:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)
    assert set(_registry) == registered


def test_an_engine_may_stay_open_at_the_end_of_the_process(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """In the middle of a step, even: the process ends with 0 and says nothing."""
    import subprocess
    import sys

    script = tmp_path / "leaves.py"
    script.write_text(f"""
from engine import LLM, SamplingParams
llm = LLM({str(checkpoints())!r}, enforce_eager=True, device="cpu", threads_per_rank=1)
stream = llm.stream([1], SamplingParams(max_tokens=250, ignore_eos=True))
print(next(stream).token_ids[0] >= 0)
""")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, env=environment, timeout=120
    )
    assert (done.returncode, done.stdout, "Error" in done.stderr) == (0, "True\n", False)


@pytest.mark.parametrize("tp", [1, 2])
def test_interrupts_at_any_moment_harm_nothing(checkpoints: Checkpoints, tp: int) -> None:
    """Ctrl-C while requests are sent, results come (a message is read in two pieces at least) and
    steps run; another thread's calls go on undisturbed."""
    options = {"num_pages": 400, "max_num_seqs": 4, "max_num_batched_tokens": 200}
    with small_engine(checkpoints(), tp=tp, **options) as llm:
        prompts = [[(n + i) % 97 for i in range(200)] for n in range(25)]
        short = SamplingParams(temperature=0, max_tokens=1)
        llm.generate(prompts, short)
        failures: list[BaseException] = []
        stop = threading.Event()

        def other() -> None:
            try:
                while not stop.is_set():
                    assert_greedy(llm)
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=other)
        thread.start()
        interrupts = 0
        for round in range(10):
            timer = threading.Timer(0.013 * round, signal.raise_signal, (signal.SIGINT,))
            try:
                timer.start()
                llm.generate(prompts, short)
                timer.join()
                time.sleep(0.01)  # the engine was faster: it strikes here
            except KeyboardInterrupt:
                interrupts += 1
        stop.set()
        thread.join()
        assert interrupts == 10 and not failures
        assert_greedy(llm)
        assert_idle(llm)


def test_a_reply_to_an_interrupted_question_is_not_the_next_ones(speaking: LLM) -> None:
    interrupts = 0
    for round in range(10):
        timer = threading.Timer(0.0007 * round, signal.raise_signal, (signal.SIGINT,))
        try:
            timer.start()
            while True:
                speaking.counters()
        except KeyboardInterrupt:
            interrupts += 1
        memory = speaking.memory()
        assert [set(m) >= {"kv_bytes"} for m in memory] == [True] * speaking.config.tp
    assert interrupts == 10
    assert "scheduled_steps" in speaking.counters()


# -- which GPUs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ("cuda", 0)),
        ({"device": "cuda"}, ("cuda", 0)),
        ({"device": "cuda:3"}, ("cuda", 3)),
        ({"device": "cuda:2", "tp": 2}, ("cuda", 2)),
        ({"device": "cpu", "tp": 4}, ("cpu", 0)),
    ],
)
def test_an_engine_takes_gpus_from_the_one_it_is_given(
    checkpoints: Checkpoints, options: dict[str, Any], expected: tuple[str, int]
) -> None:
    path = checkpoints()
    config = EngineConfig(model=str(path), enforce_eager=True, **options)
    with (
        mock.patch("torch.cuda.is_available", return_value=True),
        mock.patch("torch.cuda.device_count", return_value=4),
        mock.patch("torch.cuda.can_device_access_peer", return_value=True),
    ):
        resolved = resolve(config, ModelShape.from_hf(path))
    assert (resolved.device, resolved.first_gpu) == expected


def test_gpus_that_are_not_there_are_refused(checkpoints: Checkpoints) -> None:
    path = checkpoints()
    with (
        mock.patch("torch.cuda.is_available", return_value=True),
        mock.patch("torch.cuda.device_count", return_value=4),
        pytest.raises(
            ConfigError, match="tp=2: needs 5 GPUs here, the first being number 3; 4 visible"
        ),
    ):
        resolve(EngineConfig(model=str(path), device="cuda:3", tp=2), ModelShape.from_hf(path))
    for device in ("cuda:", "cuda:x", "gpu", "cpu:1", None):
        with pytest.raises(ConfigError, match="give auto, cpu, cuda, or cuda:N"):
            EngineConfig(model=str(path), device=device)  # type: ignore[arg-type]
