"""CUDA graphs of steps with prompts: eager's result bit for bit, whatever stands in the padding."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams
from engine.attention.flash4 import PAGE_MULTIPLE
from engine.attention.obstacles import flash4_obstacle
from engine.comm.types import Phase
from engine.execution.launched import Launched
from engine.execution.runner import Runner
from engine.execution.steplog import PHASES
from engine.graph_shapes import GraphShape, prompt_shapes, shape_of
from tests.gpu.conftest import HEADS
from tests.support.checkpoints import Checkpoints
from tests.support.greedy import greedy_reference
from tests.support.numerics import FACTOR, relative
from tests.support.probe import Probe

pytestmark = pytest.mark.gpu

BACKENDS = ("flash2_triton", "flash2", "triton", "flash4")
LENGTHS = (40, 17, 1, 300, 5)
PROMPT_TOKENS = 512
DECODE = PHASES.index(Phase.DECODE)


def sequences(lengths: tuple[int, ...], vocab: int = 97) -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(vocab) for _ in range(length)] for length in lengths]


@pytest.fixture
def half(checkpoints: Checkpoints) -> Path:
    return checkpoints(dtype="bfloat16", hidden_size=64, max_position=1024, **HEADS)


def probe_of(path: Path, attention: str, **options: Any) -> Probe:
    if attention == "flash4":
        capability = torch.cuda.get_device_capability()
        obstacle = flash4_obstacle(PAGE_MULTIPLE, 128, "bfloat16", capability)
        if obstacle is not None:
            pytest.skip(obstacle)
    options = {"enforce_eager": False, "graph_prompt_tokens": PROMPT_TOKENS, **options}
    return Probe(path, attention=attention, **options)


def driven(probe: Probe) -> list[torch.Tensor]:
    """Prompts of four lengths; the fourth in two chunks, the second of them beside sequences that
    go on; a step that decodes; a new prompt beside them. Logits of each step."""
    ids = [own + tail for own, tail in zip(sequences(LENGTHS), sequences((9,) * 5), strict=True)]
    steps: list[list[tuple[int, int, list[int]]]] = [
        [(i, 0, ids[i][: LENGTHS[i]]) for i in range(3)] + [(3, 0, ids[3][:200])],
        [(i, LENGTHS[i], ids[i][LENGTHS[i] :][:1]) for i in range(3)] + [(3, 200, ids[3][200:300])],
        [(i, LENGTHS[i] + (i < 3), ids[i][LENGTHS[i] + (i < 3) :][:1]) for i in range(4)],
        [(i, LENGTHS[i] + 1 + (i < 3), ids[i][LENGTHS[i] + 1 + (i < 3) :][:1]) for i in range(4)]
        + [(4, 0, ids[4][:5])],
    ]
    found = [probe.step(rows) for rows in steps]
    return [logits for logits in found if logits is not None]


@pytest.mark.parametrize("attention", BACKENDS)
@pytest.mark.parametrize("scope", ["off", "model"])
def test_replay_equals_eager_on_the_same_padded_batch(
    half: Path, attention: str, scope: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The eager side runs what was captured, uncaptured: of prompts and of decoding."""
    if scope != "off" and attention != "flash2_triton":
        pytest.skip("all backends stand behind the same operator in compiled code")
    options: dict[str, Any] = {"compile": scope, "cache_dir": str(tmp_path)}
    replayed = probe_of(half, attention, **options)
    by_graph = driven(replayed)
    log = replayed.runner.drain_steps()
    replayed.close()
    assert log["replayed"].all() and log["bucket"].tolist() == [384, 128, 4, 32]

    def padded_eager(runner: Runner, plan: Any) -> Launched:
        buffers, limit = runner._buffers, runner.config.max_model_len
        own = prompt_shapes(PROMPT_TOKENS, 8, limit)
        shape = shape_of(plan, (*own, GraphShape(4, 4, False)), limit)
        assert shape is not None
        rows, seqs, prompts = shape
        buffers.load(plan, rows, seqs if prompts else None)
        meta = (seqs + 1, rows, limit, 0) if prompts else (seqs, 1, limit, seqs)
        batch, sampled = buffers.views(rows, seqs, meta, all_greedy=False)
        if not prompts:
            buffers.fetch_known(batch.input_ids, seqs)
        ids = runner._forward(batch, sampled)[: plan.num_seqs]
        return Launched(ids).on_its_way(runner._readback)

    eager = probe_of(half, attention, enforce_eager=True, **options)

    def launch_padded(runner: Runner, plan: Any) -> Launched:
        with torch.inference_mode():
            return padded_eager(runner, plan)

    monkeypatch.setattr(Runner, "launch", launch_padded)
    by_hand = driven(eager)
    eager.close()
    assert len(by_graph) == len(by_hand) == 4
    for one, other in zip(by_graph, by_hand, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("attention", BACKENDS)
def test_poison_in_unnamed_pages_and_padding_changes_nothing(half: Path, attention: str) -> None:
    clean = probe_of(half, attention)
    expected = driven(clean)
    clean.close()
    poisoned = probe_of(half, attention)
    poisoned.poison()
    found = driven(poisoned)
    poisoned.close()
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("attention", BACKENDS)
def test_launched_prompts_give_the_same_within_bf16(half: Path, attention: str) -> None:
    """Other numbers of rows take other products: no further from float32 than launched ones."""
    exact = probe_of(half, "sdpa", dtype="float32", graph_prompt_tokens=0)
    reference = torch.cat(driven(exact))
    exact.close()
    errors = []
    for rows in (PROMPT_TOKENS, 0):
        probe = probe_of(half, attention, graph_prompt_tokens=rows)
        errors.append(relative(torch.cat(driven(probe)), reference))
        probe.close()
    print(f"{attention}: replayed {errors[0]:.2e}, launched {errors[1]:.2e}")
    assert errors[0] <= FACTOR * errors[1]


@pytest.mark.parametrize(
    ("tp", "comm"), [(1, "auto"), (2, "nccl"), (2, "symm_mem"), (2, "symm_fused")]
)
@pytest.mark.parametrize("budget", [24, 64, 512])
def test_greedy_tokens_are_transformers(
    checkpoints: Checkpoints, budget: int, tp: int, comm: str
) -> None:
    """In float32, planned a step ahead: chunks, chunks beside sequences whose last token is still
    on the device, prefixes from the cache. No step is launched."""
    if tp > torch.cuda.device_count():
        pytest.skip(f"needs {tp} CUDA devices")
    path = checkpoints(**HEADS)
    prompts = [ids[: 3 + 7 * (i % 9)] for i, ids in enumerate(sequences((70,) * 18))]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    options: dict[str, Any] = {"attention": "triton", "page_size": 16, "max_model_len": 96}
    with LLM(
        path, tp=tp, comm=comm, max_num_seqs=20, num_pages=200,
        max_num_batched_tokens=budget, graph_prompt_tokens=budget, **options,
    ) as llm:  # fmt: skip
        for _ in range(2):
            for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
                assert tuple(output.token_ids) == greedy_reference(path, tuple(prompt), 12)
        steps = llm.drain_steps()[0]
        assert llm.counters()["cached_tokens"] > 0
    assert steps["replayed"].all() and (steps["phase"] != DECODE).sum() >= 2


def test_what_a_graph_does_not_sample_is_launched(half: Path) -> None:
    """A penalty counts from the first token on: its prompt is launched, its decoding replayed."""
    prompt = sequences((30,))[0]
    with LLM(half, max_num_seqs=2, max_model_len=256, num_pages=8) as llm:
        llm.generate([prompt], SamplingParams(max_tokens=4, ignore_eos=True, presence_penalty=1.0))
        llm.generate([prompt], SamplingParams(max_tokens=4, ignore_eos=True))
        (steps,) = llm.drain_steps()
    assert steps["phase"].tolist() == [0, 1, 1, 1] * 2
    assert steps["replayed"].tolist() == [False, *[True] * 7]
