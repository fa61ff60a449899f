"""TP=2: numerics over NCCL; by either path long alternation of replays and prefills, compile caches
and shutdown."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, EngineDeadError, SamplingParams
from tests.gpu.conftest import HEADS
from tests.support.checkpoints import Checkpoints
from tests.support.greedy import greedy_reference
from tests.support.numerics import FACTOR, PROMPT, relative, token_ids
from tests.support.pids import assert_gone, rank_pids
from tests.support.rank_processes import run_processes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

COMMS = pytest.mark.parametrize("comm", ["nccl", "symm_mem", "symm_fused"])


def _probe_rank(rank: int, port: int, path: Path, out: Path, options: dict[str, Any]) -> None:
    from engine.comm.process_group import ProcessGroupCommunicator
    from tests.support.probe import Probe

    torch.cuda.set_device(rank)
    comm = ProcessGroupCommunicator(rank, 2, "nccl", port)
    probe = Probe(path, comm, tp=2, **options)
    logits = probe.teacher_forced(token_ids(), PROMPT)
    if logits is not None:
        torch.save(logits.cpu(), out)
    comm.barrier()
    probe.close()


@pytest.mark.parametrize(
    "given",
    [
        {"enforce_eager": True},
        {"enforce_eager": False},
        {"enforce_eager": False, "compile": "model"},
        {"enforce_eager": False, "linear": "torch", "fused": "layers"},
    ],
    ids=str,
)
def test_logits_are_as_near_float32_as_transformers(
    qwen3_0_6b: Path,
    references: dict[str, torch.Tensor],
    given: dict[str, Any],
    compile_cache: Path,
    tmp_path: Path,
) -> None:
    options = {**given, "cache_dir": str(compile_cache)}
    out = tmp_path / "logits.pt"
    run_processes(_probe_rank, qwen3_0_6b, out, options)
    own = torch.load(out).cuda()
    exact = references["float32"]
    theirs, ours = relative(references["bfloat16"], exact), relative(own, exact)
    print(f"tp=2 {options}: relative error {ours:.2e}, transformers {theirs:.2e}")
    assert ours <= FACTOR * theirs


@COMMS
def test_ten_thousand_replays_between_prefills(checkpoints: Checkpoints, comm: str) -> None:
    """Short requests arriving all the time, so that replays, mixed steps and prefills alternate;
    float32 tokens stay those of transformers from the first to the last."""
    path = checkpoints(**HEADS)
    rng = random.Random(3)
    prompts = [[rng.randrange(97) for _ in range(rng.randrange(1, 30))] for _ in range(20)]
    params = SamplingParams(temperature=0, max_tokens=25, ignore_eos=True)
    expected = [greedy_reference(path, tuple(p), 25) for p in prompts]
    options: dict[str, Any] = {"page_size": 8, "attention": "sdpa", "max_model_len": 64}
    options |= {"max_num_seqs": 4, "max_num_batched_tokens": 16, "comm": comm}
    with LLM(path, tp=2, num_pages=32, **options) as llm:  # four sequences of 64 positions
        replays = rounds = 0
        while replays < 10_000:
            outputs = llm.generate(prompts, params)
            assert [tuple(o.token_ids) for o in outputs] == expected
            replays += int((llm.drain_steps()[0]["phase"] == 1).sum())
            rounds += 1
        assert llm.counters()["captures"] == 2 * 3  # buckets 1, 2, 4 on two ranks
        begin = time.monotonic()
    assert time.monotonic() - begin < 10
    llm.close()


@COMMS
def test_a_compile_cache_serves_the_ranks_that_filled_it(
    checkpoints: Checkpoints, tmp_path: Path, comm: str
) -> None:
    """Cold, then warm: each rank finds its own code, which names its own GPU."""
    path = checkpoints(**HEADS)
    prompts = [[(7 * i + 3 * n) % 97 for i in range(n)] for n in (1, 9, 29)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    options: dict[str, Any] = {"page_size": 8, "attention": "sdpa", "max_model_len": 64}
    options |= {"num_pages": 24, "comm": comm}  # three sequences of 64 positions
    for _ in range(2):
        with LLM(path, tp=2, compile="model", cache_dir=str(tmp_path), **options) as llm:
            for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
                assert tuple(output.token_ids) == greedy_reference(path, tuple(prompt), 12)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rank0-gpu0", "rank1-gpu1"]


@COMMS
def test_a_rank_that_is_killed_in_a_replay_is_named_and_nothing_stays(
    checkpoints: Checkpoints, comm: str
) -> None:
    """Its peer spins inside a collective of a graph, which no exception reaches."""
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    options: dict[str, Any] = {"page_size": 8, "num_pages": 200, "attention": "sdpa", "comm": comm}
    llm = LLM(checkpoints(**HEADS), tp=2, max_num_seqs=4, **options)
    pids = rank_pids(llm)
    threading.Timer(0.5, os.kill, (pids[1], signal.SIGKILL)).start()
    begin = time.monotonic()
    with pytest.raises(EngineDeadError) as caught:
        while True:
            llm.generate([[1, 2, 3]] * 4, params)
    assert time.monotonic() - begin < 10
    assert (caught.value.rank, caught.value.exitcode) == (1, -signal.SIGKILL)
    assert_gone(pids)
    llm.close()
    llm.close()
