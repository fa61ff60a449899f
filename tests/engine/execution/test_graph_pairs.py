"""Which graphs a decode step takes and what happens between two, with graphs that are played."""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any

import pytest

from engine import SamplingParams
from engine.comm import Collective, CollectiveObserver, Communicator
from engine.comm.types import StepInfo
from engine.execution import graphs
from engine.graph_shapes import bucket_sizes
from engine.requests.request import Request
from tests.support.checkpoints import Checkpoints
from tests.support.engines import small_engine
from tests.support.fake_graphs import FakeRecorder, GraphRank
from tests.support.sampling import mixed_params, mixed_prompts
from tests.support.threads import run_ranks

PROMPTS, PARAMS = mixed_prompts(), mixed_params()
OPTIONS: dict[str, Any] = {"page_size": 8, "max_num_seqs": 12, "max_model_len": 64}


@pytest.fixture(autouse=True)
def played(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "Recorder", FakeRecorder)


def requests(prompts: list[list[int]], params: list[SamplingParams]) -> list[Request]:
    pairs = enumerate(zip(prompts, params, strict=True))
    return [Request(str(i), list(p), s, s.seed or 0, 0.0) for i, (p, s) in pairs]


def serve(
    path: Path,
    tp: int,
    prompts: list[list[int]],
    params: list[SamplingParams],
    observers: Any = None,
    **options: Any,
) -> list[tuple[list[Request], GraphRank]]:
    """-> each rank's requests and what it did."""
    pipe: queue.Queue[bytes | None] = queue.Queue()

    def on_rank(comm: Communicator) -> tuple[list[Request], GraphRank]:
        rank = GraphRank(path, comm, pipe, **{**OPTIONS, **options})
        if observers is not None:
            comm.attach([observers[comm.rank]])
        return rank.serve(lambda: requests(prompts, params)), rank

    return run_ranks(tp, on_rank)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("options", [{}, {"num_pages": 14}])
def test_a_mixed_batch_gives_what_eager_steps_give(
    checkpoints: Checkpoints, tp: int, options: dict[str, int]
) -> None:
    path = checkpoints()
    with small_engine(path) as eager:
        wanted = eager.generate(PROMPTS, PARAMS)
    (found, rank), *_ = serve(path, tp, PROMPTS, PARAMS, **options)
    for request, output in zip(found, wanted, strict=True):
        assert request.output_ids == output.token_ids
        for entry, other in zip(request.logprobs, output.logprobs or (), strict=True):
            assert (entry.token_id, entry.rank) == (other.token_id, other.rank)
            assert entry.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert len(request.prompt_logprobs) == max(0, len(output.prompt_logprobs or ()) - 1)
    assert (sum(request.preemptions for request in found) > 0) == ("num_pages" in options)
    assert rank.runner._graphs is not None and len(rank.runner._graphs.late_captures) > 1


def test_plain_steps_replay_once_and_others_twice(checkpoints: Checkpoints) -> None:
    plain = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    ((_, rank),) = serve(checkpoints(), 1, PROMPTS[:3], [plain] * 3)
    buckets = [1] * len(bucket_sizes(12))
    assert rank.recorder.captured == buckets
    assert rank.recorder.replays == 5
    # Two tokens at least: the step after the prompts masks, and those after it are plain.
    longer = SamplingParams(temperature=0, max_tokens=6, min_tokens=2, ignore_eos=True)
    ((_, rank),) = serve(checkpoints(), 1, PROMPTS[:3], [plain, longer, plain])
    assert rank.recorder.captured == [*buckets, 2]
    assert rank.recorder.replays == 2 + 4
    assert rank.runner.counters()["captures"] == len(buckets) + 1


class Captured(CollectiveObserver):
    """Can be captured; keeps what it hears while it is, and which steps it hears."""

    captures = True

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def step_begin(self, step: StepInfo) -> None:
        self.heard.append(step.step)

    def before(self, collective: Collective) -> None:
        self.heard.append((collective.ordinal, collective.kind.label, collective.site.label))

    def capture_begin(self, step: StepInfo) -> None:
        self.heard.append(("begin", step.bucket))

    def capture_end(self, step: StepInfo) -> None:
        self.heard.append(("end", step.bucket))


def test_an_observer_hears_one_whole_step_in_a_pair(checkpoints: Checkpoints) -> None:
    """The sequence is that of a plain step: what a timer counts on while graphs replay."""
    params = [SamplingParams(temperature=1, top_k=3, seed=0, max_tokens=4, ignore_eos=True)]
    heard = []
    for given in (params, [SamplingParams(seed=0, max_tokens=4, ignore_eos=True)]):
        observers = [Captured(), Captured()]
        serve(checkpoints(), 2, [[5, 6, 7]], given, observers)
        assert observers[0].heard == observers[1].heard
        heard.append(observers[0].heard)
    assert heard[0] == heard[1]
    pair = heard[0][heard[0].index(1) :]
    layers = [kind for _ in range(3) for kind in ("attn.o_proj", "mlp.down_proj")]
    body = [("all_reduce", site) for site in ("embed", *layers)]
    tail = [("gather", "lm_head"), ("broadcast", "token_ids")]
    collectives = [(i, *pair) for i, pair in enumerate(body + tail)]
    assert pair == [1, ("begin", 1), *collectives, ("end", 1), 2, 3]
