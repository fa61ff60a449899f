"""Graphs of steps with prompts, played on a CPU: which steps have one, and that padding with rows
and sequences changes no token."""

from __future__ import annotations

import queue
import random
from pathlib import Path
from typing import Any

import pytest

from engine import SamplingParams
from engine.comm import Communicator
from engine.comm.types import Phase
from engine.execution import graphs
from engine.execution.steplog import PHASES
from engine.graph_shapes import (
    PROMPT_ROWS,
    GraphShape,
    decode_shapes,
    prompt_limit,
    prompt_shapes,
    shape_of,
)
from engine.requests.request import Request
from engine.scheduling.step import ScheduledSeq, StepPlan
from engine.shape import ModelShape
from tests.support.checkpoints import Checkpoints
from tests.support.fake_graphs import FakeRecorder, GraphRank
from tests.support.greedy import greedy_reference
from tests.support.threads import run_ranks


def prompts(lengths: list[int]) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(97) for _ in range(length)] for length in lengths]


def serve(
    path: Path, given: list[list[int]], world: int = 1, **options: Any
) -> tuple[list[Request], GraphRank]:
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    pipe: queue.Queue[bytes | None] = queue.Queue()

    def on_rank(comm: Communicator) -> tuple[list[Request], GraphRank]:
        rank = GraphRank(path, comm, pipe, page_size=8, **options)
        asked = [Request(str(i), list(ids), params, 0, 0.0) for i, ids in enumerate(given)]
        return rank.serve(lambda: asked), rank

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "Recorder", FakeRecorder)
        return run_ranks(world, on_rank)[0]


LENGTHS = [40, 3, 17, 1, 29, 64, 5]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("budget", [24, 64, 256])
def test_tokens_are_transformers_whatever_is_padded(
    checkpoints: Checkpoints, budget: int, world: int
) -> None:
    """Chunks that end in the middle of a prompt, chunks beside sequences that decode, a step that
    samples nothing, and prompts alone: all are replays, of more rows and sequences than they have.
    """
    path = checkpoints()
    given = prompts(LENGTHS)
    requests, rank = serve(
        path, given, world, prompt_tokens=budget, max_num_seqs=8, max_model_len=80,
        max_num_batched_tokens=budget,
    )  # fmt: skip
    for request in requests:
        expected = greedy_reference(path, tuple(request.prompt_ids), 9)
        assert tuple(request.output_ids) == expected
    steps = rank.runner.drain_steps()
    with_prompts = steps[steps["phase"] != PHASES.index(Phase.DECODE)]
    assert steps["replayed"].all() and len(with_prompts) >= -(-sum(LENGTHS) // budget)
    rows = [min(r for r in (*PROMPT_ROWS, budget) if r >= n) for n in with_prompts["tokens"]]
    assert with_prompts["bucket"].tolist() == rows
    if budget == 24:
        assert 0 in with_prompts["samples"]
        assert PHASES.index(Phase.MIXED) in with_prompts["phase"]


def test_one_sequence_at_a_time_has_room_for_the_padding(checkpoints: Checkpoints) -> None:
    path = checkpoints()
    requests, rank = serve(
        path, prompts([20, 33]), prompt_tokens=60, max_num_seqs=1, max_model_len=60
    )
    for request in requests:
        expected = greedy_reference(path, tuple(request.prompt_ids), 9)
        assert tuple(request.output_ids) == expected
    assert rank.runner.drain_steps()["replayed"].all()


def test_a_step_that_fits_no_graph_is_launched(checkpoints: Checkpoints) -> None:
    """One row above the largest."""
    path = checkpoints()
    given = prompts([33, 32])
    _, rank = serve(path, given[:1], prompt_tokens=32, max_num_seqs=2, max_model_len=48)
    steps = rank.runner.drain_steps()
    assert steps["replayed"].tolist() == [False] + [True] * 8
    assert steps["bucket"][0] == 33
    _, rank = serve(path, given[1:], prompt_tokens=32, max_num_seqs=2, max_model_len=48)
    assert rank.runner.drain_steps()["replayed"].all()


def plan_of(lengths: list[int], decodes: int = 0, **params: Any) -> StepPlan:
    seqs = []
    for i in range(decodes):
        request = Request(f"d{i}", [1, 2], SamplingParams(), 0, 0.0)
        request.slot = i
        request.output_ids.append(3)
        seqs.append(ScheduledSeq(request, 2, 1, True, True))
    for i, length in enumerate(lengths):
        request = Request(f"p{i}", [1] * length, SamplingParams(**params), 0, 0.0)
        request.slot = decodes + i
        seqs.append(ScheduledSeq(request, 0, length, True))
    return StepPlan.from_schedule(0, seqs)


SHAPES = decode_shapes(16) + prompt_shapes(512, 16, 300)


@pytest.mark.parametrize(
    ("plan", "found"),
    [
        (plan_of([32]), GraphShape(32, 16, True)),
        (plan_of([33]), GraphShape(64, 16, True)),
        (plan_of([8] * 16), GraphShape(128, 16, True)),
        (plan_of([100], decodes=15), GraphShape(128, 16, True)),
        (plan_of([], decodes=3), GraphShape(4, 4, False)),
        (plan_of([2] * 17), None),  # more sequences than any graph takes
        (plan_of([512]), GraphShape(512, 16, True)),
        (plan_of([513]), None),
        (plan_of([40], prompt_logprobs=1), None),
        (plan_of([40], presence_penalty=1.0), None),
        (plan_of([40], temperature=0.7, seed=3), GraphShape(64, 16, True)),
    ],
)
def test_which_graph_takes_a_step(plan: StepPlan, found: GraphShape | None) -> None:
    assert shape_of(plan, SHAPES, 300) == found


def test_padding_has_the_sequences_that_are_left() -> None:
    """Of 100 tokens at most: beside one of two sequences two for padding, beside both one alone."""
    shapes = (GraphShape(160, 2, True),)
    assert shape_of(plan_of([1]), shapes, 100) == shapes[0]
    assert shape_of(plan_of([59, 1]), shapes, 100) == shapes[0]
    assert shape_of(plan_of([58, 1]), shapes, 100) is None


def test_shapes_end_at_the_limit_and_could_all_be_full() -> None:
    """As many rows as the limit says last; of 16 sequences of 20 tokens never more than 320."""
    assert [one.rows for one in prompt_shapes(100, 16, 1000)] == [32, 64, 100]
    assert prompt_shapes(0, 16, 1000) == ()
    assert prompt_shapes(1024, 16, 20)[-1] == GraphShape(320, 16, True)
    assert prompt_shapes(4096, 1, 1000)[-1] == GraphShape(1000, 1, True)
    assert prompt_shapes(4096, 256, 4096)[-1] == GraphShape(4096, 32, True)


@pytest.mark.parametrize(
    ("sizes", "tp", "budget", "rows"),
    [
        ((1024, 16, 8, 3072), 1, 8192, 4096),  # 0.6B: 15.7e6 weights a layer, 5,722 rows
        ((4096, 32, 8, 12288), 1, 8192, 512),  # 8B: 193e6, 466
        ((4096, 32, 8, 12288), 2, 8192, 1024),  # half as many a rank, 933
        ((1024, 16, 8, 3072), 1, 700, 700),  # a step has no more
    ],
)
def test_limits_of_published_shapes(
    sizes: tuple[int, int, int, int], tp: int, budget: int, rows: int, checkpoints: Checkpoints
) -> None:
    """By hand: 450 us of launching a layer at 400 TFLOP/s, 2 FLOPs a weight and row."""
    from dataclasses import replace

    hidden, heads, kv_heads, intermediate = sizes
    shape = replace(
        ModelShape.from_hf(checkpoints()), hidden_size=hidden, num_heads=heads,
        num_kv_heads=kv_heads, head_dim=128, intermediate_size=intermediate,
    )  # fmt: skip
    assert prompt_limit(shape, tp, budget) == rows
