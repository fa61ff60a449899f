"""TP=2 over NCCL: numerics, long alternation of replays and prefills, memory, shutdown."""

from __future__ import annotations

import multiprocessing
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams
from engine.comm.rendezvous import Rendezvous
from tests.gpu.conftest import HEADS
from tests.gpu.test_numerics import FACTOR, PROMPT, relative, token_ids
from tests.support.checkpoints import Checkpoints
from tests.support.greedy import greedy_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


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


@pytest.mark.parametrize(("scope", "eager"), [("off", True), ("off", False), ("model", False)])
def test_logits_are_as_near_float32_as_transformers(
    qwen3_0_6b: Path, scope: str, eager: bool, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    options = {"compile": scope, "enforce_eager": eager, "cache_dir": str(tmp_path / "cache")}
    context = multiprocessing.get_context("spawn")
    out = tmp_path / "logits.pt"
    rendezvous = Rendezvous()
    arguments = (rendezvous.port, qwen3_0_6b, out, options)
    ranks = [context.Process(target=_probe_rank, args=(rank, *arguments)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0, 0]
    own = torch.load(out).cuda()
    found = {}
    for dtype in ("float32", "bfloat16"):
        model = AutoModelForCausalLM.from_pretrained(qwen3_0_6b, dtype=dtype).cuda().eval()
        with torch.inference_mode():
            logits = model(torch.tensor(token_ids(), device="cuda")).logits
        found[dtype] = logits[:, PROMPT - 1 :].float()
    theirs = relative(found["bfloat16"], found["float32"])
    ours = relative(own, found["float32"])
    print(f"tp=2 {options}: relative error {ours:.2e}, transformers {theirs:.2e}")
    assert ours <= FACTOR * theirs


def test_ten_thousand_replays_between_prefills(checkpoints: Checkpoints) -> None:
    """Short requests arriving all the time, so that replays, mixed steps and prefills alternate;
    float32 tokens stay those of transformers from the first to the last."""
    path = checkpoints(**HEADS)
    rng = random.Random(3)
    prompts = [[rng.randrange(97) for _ in range(rng.randrange(1, 30))] for _ in range(20)]
    params = SamplingParams(temperature=0, max_tokens=25, ignore_eos=True)
    expected = [greedy_reference(path, tuple(p), 25) for p in prompts]
    options: dict[str, Any] = {"page_size": 8, "attention": "sdpa", "max_model_len": 64}
    with LLM(path, tp=2, max_num_seqs=4, max_num_batched_tokens=16, **options) as llm:
        replays = rounds = 0
        while replays < 10_000:
            outputs = llm.generate(prompts, params)
            assert [tuple(o.token_ids) for o in outputs] == expected
            replays += int((llm.drain_steps()[0]["phase"] == 1).sum())
            rounds += 1
        assert llm.counters()["captures"] == 2 * 3  # buckets 1, 2, 4 on two ranks
        begin = time.monotonic()
    assert time.monotonic() - begin < 10


def test_ranks_agree_on_the_smaller_cache(checkpoints: Checkpoints) -> None:
    path = checkpoints(dtype="bfloat16", hidden_size=64, **HEADS)
    held = torch.empty(10 << 30, dtype=torch.uint8, device="cuda:1")
    options: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 256, "tp": 2}
    with LLM(path, memory_utilization=0.98, enforce_eager=True, **options) as llm:
        memory = llm.memory()
        llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=4))
    del held
    assert memory[0]["kv_bytes"] == memory[1]["kv_bytes"]
