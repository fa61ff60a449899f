"""CUDA graphs: the eager result bit for bit, padding and poison without effect, any batch size."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, FinishReason, SamplingParams
from engine.comm.types import Phase
from engine.execution.launched import Launched
from engine.execution.runner import Runner
from engine.graph_shapes import bucket_sizes
from tests.gpu.conftest import HEADS
from tests.support.checkpoints import Checkpoints
from tests.support.greedy import greedy_reference
from tests.support.probe import Probe

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def sequences(count: int, length: int, vocab: int = 97) -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(vocab) for _ in range(length)] for _ in range(count)]


@pytest.fixture
def half(checkpoints: Checkpoints) -> Path:
    return checkpoints(dtype="bfloat16", hidden_size=64, max_position=1024, **HEADS)


@pytest.mark.parametrize(
    ("attention", "scope"), [("auto", "off"), ("auto", "model"), ("triton", "off")]
)
def test_replay_equals_eager_on_the_same_padded_batch(
    half: Path, attention: str, scope: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Five sequences in a bucket of eight; the eager side runs what was captured, uncaptured."""
    ids = sequences(5, 40)
    options: dict[str, Any] = {
        "attention": attention,
        "compile": scope,
        "cache_dir": str(tmp_path),
        "graph_prompt_tokens": 0,  # padded prompts take other products (test_prompt_graphs.py)
    }
    replayed = Probe(half, enforce_eager=False, **options)
    graph_logits = replayed.teacher_forced(ids, 30)
    assert replayed.runner._graphs is not None and replayed.runner._graphs.mode.startswith("graph")
    replayed.close()

    def padded_eager(runner: Runner, plan: Any) -> Launched:
        runner._buffers.load(plan, 8)
        batch, rows = runner._buffers.views(8, 8, (8, 1, 1024, 8), all_greedy=False)
        runner._buffers.fetch_known(batch.input_ids, 8)
        ids = runner._forward(batch, rows)[: plan.num_seqs]
        return Launched(ids).on_its_way(runner._readback)

    eager = Probe(half, enforce_eager=True, **options)
    launch = Runner.launch

    def launch_padded(runner: Runner, plan: Any) -> Launched:
        with torch.inference_mode():
            if plan.phase is Phase.DECODE:
                return padded_eager(runner, plan)
            return launch(runner, plan)

    monkeypatch.setattr(Runner, "launch", launch_padded)
    eager_logits = eager.teacher_forced(ids, 30)
    eager.close()
    assert graph_logits is not None and eager_logits is not None
    assert torch.equal(graph_logits, eager_logits)


@pytest.mark.parametrize("attention", ["auto", "triton"])
def test_poison_in_unnamed_pages_and_padding_changes_nothing(half: Path, attention: str) -> None:
    ids = sequences(5, 40)
    clean = Probe(half, enforce_eager=False, attention=attention)
    expected = clean.teacher_forced(ids, 30)
    clean.close()
    poisoned = Probe(half, enforce_eager=False, attention=attention)
    poisoned.poison()
    found = poisoned.teacher_forced(ids, 30)
    poisoned.close()
    assert expected is not None and found is not None
    assert torch.equal(expected, found)


@pytest.mark.parametrize("attention", ["sdpa", "triton"])
@pytest.mark.parametrize("batch", [1, 5, 16, 17, 20])
def test_tokens_of_batches_off_the_buckets(
    checkpoints: Checkpoints, batch: int, attention: str
) -> None:
    """In float32, so that tokens must be those of transformers."""
    path = checkpoints(**HEADS)
    prompts = [ids[: 3 + i % 7] for i, ids in enumerate(sequences(batch, 10))]
    options: dict[str, Any] = {"page_size": 8, "attention": attention, "max_model_len": 64}
    with LLM(path, max_num_seqs=20, num_pages=160, **options) as llm:
        outputs = llm.generate(prompts, GREEDY)
        assert llm.effective["mode"] == "graph"
        (steps,) = llm.drain_steps()
    for prompt, output in zip(prompts, outputs, strict=True):
        assert tuple(output.token_ids) == greedy_reference(path, tuple(prompt), 12)
    decodes = steps[steps["phase"] == 1]
    assert set(decodes["bucket"].tolist()) == {min(b for b in bucket_sizes(20) if b >= batch)}


def test_buckets_of_more_rows_than_a_sequence_has_positions(checkpoints: Checkpoints) -> None:
    """Captures of 512 rows with block tables for 128 positions read nothing past them."""
    path = checkpoints(**HEADS)
    prompts = [ids[: 3 + i % 7] for i, ids in enumerate(sequences(512, 10))]
    options: dict[str, Any] = {"page_size": 8, "attention": "sdpa", "max_model_len": 128}
    with LLM(path, max_num_seqs=512, num_pages=2_000, **options) as llm:
        outputs = llm.generate(prompts, GREEDY)
        (steps,) = llm.drain_steps()
    decodes = steps[steps["phase"] == 1]
    assert decodes["bucket"].max() == 512
    for prompt, output in list(zip(prompts, outputs, strict=True))[::37]:
        assert tuple(output.token_ids) == greedy_reference(path, tuple(prompt), 12)


@pytest.mark.parametrize("eager", [True, False])
def test_the_models_length_ends_a_request(checkpoints: Checkpoints, eager: bool) -> None:
    """500 prompt tokens and 100 wanted of a length of 512: 12, and a block table that is full."""
    path = checkpoints(max_position=512, **HEADS)
    prompt = sequences(1, 500)[0]
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    options: dict[str, Any] = {"page_size": 16, "attention": "sdpa", "max_model_len": 512}
    with LLM(path, enforce_eager=eager, num_pages=64, max_num_seqs=2, **options) as llm:
        output = llm.generate([prompt], params)[0]
    assert output.finish_reason is FinishReason.LENGTH
    assert tuple(output.token_ids) == greedy_reference(path, tuple(prompt), 12)


def test_preemption_and_warm_prefixes_under_graphs(checkpoints: Checkpoints) -> None:
    path = checkpoints(**HEADS)
    shared = sequences(1, 16)[0]
    prompts = [shared + tail for tail in sequences(6, 5)]
    options: dict[str, Any] = {"page_size": 8, "attention": "sdpa", "max_model_len": 64}
    with LLM(path, num_pages=9, max_num_seqs=8, **options) as llm:
        for _ in range(2):
            for prompt, output in zip(prompts, llm.generate(prompts, GREEDY), strict=True):
                assert tuple(output.token_ids) == greedy_reference(path, tuple(prompt), 12)
        counters = llm.counters()
    assert counters["preemptions"] > 0 and counters["cached_tokens"] > 0


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("attention", ["auto", "triton"])
def test_nothing_is_built_after_start_up(half: Path, attention: str, eager: bool) -> None:
    """Whatever the number of sequences: with splits and without, on both sides of own products."""
    options: dict[str, Any] = {"max_num_seqs": 80, "max_model_len": 256, "num_pages": 320}
    with LLM(half, enforce_eager=eager, attention=attention, **options) as llm:
        before = llm.counters()["triton_builds"]
        for count in (1, 2, 9, 17, 33, 64, 65, 80):
            llm.generate(sequences(count, 12), GREEDY)
        llm.generate(sequences(5, 12), SamplingParams(temperature=0.8, seed=1, max_tokens=4))
        assert llm.counters()["triton_builds"] == before > 0


def test_seeded_tokens_are_those_of_eager(half: Path) -> None:
    prompts = sequences(8, 12)
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=20) for i in range(8)]
    found = []
    for eager in (True, False):
        options: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 512, "num_pages": 32}
        options["graph_prompt_tokens"] = 0
        with LLM(half, enforce_eager=eager, **options) as llm:
            found.append([o.token_ids for o in llm.generate(prompts, params)])
    same = [a == b for a, b in zip(*found, strict=True)]
    assert sum(same) >= 7  # bf16 kernels of padded and unpadded batches may part once
