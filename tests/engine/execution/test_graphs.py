"""Buckets of decode steps, and batches that fill them, with graphs that are played on a CPU."""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any

import pytest

from engine import FinishReason, SamplingParams
from engine.comm import Communicator
from engine.execution import graphs
from engine.graph_shapes import bucket_sizes
from engine.requests.request import Request
from tests.support.checkpoints import Checkpoints
from tests.support.fake_graphs import FakeRecorder, GraphRank
from tests.support.greedy import greedy_reference
from tests.support.threads import run_ranks

PROMPTS = [[(7 * i + 3 * n) % 97 for i in range(n)] for n in (1, 3, 5)]


def serve(path: Path, count: int, tokens: int, **options: Any) -> tuple[list[Request], GraphRank]:
    """`count` greedy requests of one rank, prompts taken in turn."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    pipe: queue.Queue[bytes | None] = queue.Queue()

    def on_rank(comm: Communicator) -> tuple[list[Request], GraphRank]:
        rank = GraphRank(path, comm, pipe, page_size=8, **options)
        requests = [
            Request(str(i), list(PROMPTS[i % len(PROMPTS)]), params, 0, 0.0) for i in range(count)
        ]
        return rank.serve(lambda: requests), rank

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "Recorder", FakeRecorder)
        return run_ranks(1, on_rank)[0]


def assert_greedy(path: Path, requests: list[Request], tokens: int) -> None:
    for request in requests:
        expected = greedy_reference(path, tuple(request.prompt_ids), tokens)
        assert tuple(request.output_ids) == expected


@pytest.mark.parametrize("max_num_seqs", [1, 3, 9, 12, 17, 20, 33, 256])
def test_every_batch_has_a_bucket_and_the_last_is_max_num_seqs(max_num_seqs: int) -> None:
    """Sizes between the strides, below the first of them, and none above what can run."""
    sizes = bucket_sizes(max_num_seqs)
    assert sizes[-1] == max_num_seqs and list(sizes) == sorted(set(sizes))
    assert sizes[0] >= 1 and set(sizes) <= set(range(1, max_num_seqs + 1))
    widths = [next(size for size in sizes if size >= n) for n in range(1, max_num_seqs + 1)]
    assert all(width < n + 16 for n, width in enumerate(widths, 1))


@pytest.mark.parametrize("max_num_seqs", [1, 3, 12, 17, 33])
def test_a_full_batch_replays_the_largest_bucket(
    checkpoints: Checkpoints, max_num_seqs: int
) -> None:
    path = checkpoints()
    requests, rank = serve(
        path, max_num_seqs, 4, max_num_seqs=max_num_seqs, max_model_len=16,
        max_num_batched_tokens=256,
    )  # fmt: skip
    assert_greedy(path, requests, 4)
    steps = rank.runner.drain_steps()
    assert steps["phase"].tolist() == [0, 1, 1, 1]
    assert steps["bucket"][1:].tolist() == [max_num_seqs] * 3
    assert rank.recorder.replays == 3


def test_more_rows_than_a_sequence_has_positions(checkpoints: Checkpoints) -> None:
    """Captured rows are padding, one position each on a page of their own: nothing is read past a
    block table of two pages, however many rows the bucket has."""
    path = checkpoints()
    requests, rank = serve(path, 70, 9, max_num_seqs=80, max_model_len=14)
    assert rank.runner._graphs is not None and rank.runner._graphs._shapes[-1].rows == 80
    assert rank.recorder.captured == [1] * len(bucket_sizes(80))
    assert_greedy(path, requests, 9)


def test_the_models_length_ends_a_replayed_request(checkpoints: Checkpoints) -> None:
    """The last token that a block table has room for is sampled, and none is asked for after it."""
    path = checkpoints()
    requests, _ = serve(path, 3, 100, max_num_seqs=4, max_model_len=16)
    for request, prompt in zip(requests, PROMPTS, strict=True):
        assert request.finish_reason is FinishReason.LENGTH
        assert len(request.output_ids) == 16 - len(prompt)
        assert_greedy(path, [request], 16 - len(prompt))
