"""Log-probabilities of outputs and prompts, against transformers' logits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import log_softmax

from engine import LLM, RequestOutput, SamplingParams, TokenLogprobs
from engine.execution.launched import Launched
from engine.execution.runner import Runner
from engine.parallel import ParallelLMHead
from engine.requests.request import Request
from engine.sampling import stage
from engine.sampling.logprobs import LogprobTensors
from engine.sampling.plan import SamplingPlan
from engine.scheduling.step import ScheduledSeq
from tests.support.checkpoints import Checkpoints, reference_logits
from tests.support.engines import small_engine
from tests.support.sampling import mixed_params, mixed_prompts

PROMPTS, PARAMS = mixed_prompts(), mixed_params()
WANTED = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, prompt_logprobs=1)
LONG = PROMPTS[0] + [11, 12, 13] * 12


@pytest.fixture(scope="module")
def llm(checkpoints: Checkpoints) -> Iterator[LLM]:
    with small_engine(checkpoints()) as made:
        yield made


def assert_entries(
    path: Path, token_ids: list[int], first: int, entries: tuple[Any, ...], top: int
) -> None:
    """entries[i] is of token first + i of the sequence."""
    exact = log_softmax(reference_logits(path, token_ids).double().numpy(), axis=1)
    for place, entry in enumerate(entries, first):
        row, token = exact[place - 1], token_ids[place]
        order = np.argsort(-row)
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(row[token], abs=1e-4)
        assert entry.rank == 1 + int((row > row[token]).sum())
        assert [t for t, _ in entry.top] == order[:top].tolist()
        np.testing.assert_allclose([v for _, v in entry.top], row[order[:top]], atol=1e-4)


def assert_logprobs(path: Path, outputs: list[RequestOutput]) -> None:
    for prompt, params, output in zip(PROMPTS, PARAMS, outputs, strict=True):
        whole = prompt + output.token_ids
        if params.logprobs is None:
            assert output.logprobs is None
        else:
            assert output.logprobs is not None
            assert len(output.logprobs) == len(output.token_ids)
            assert_entries(path, whole, len(prompt), output.logprobs, params.logprobs)
        if params.prompt_logprobs is None:
            assert output.prompt_logprobs is None
        else:
            assert output.prompt_logprobs is not None
            assert len(output.prompt_logprobs) == len(prompt)
            assert output.prompt_logprobs[0] is None
            assert_entries(path, whole, 1, output.prompt_logprobs[1:], params.prompt_logprobs)


def test_a_mixed_batch(llm: LLM) -> None:
    assert_logprobs(Path(llm.config.model), llm.generate(PROMPTS, PARAMS))


def test_chunks_and_preemption(checkpoints: Checkpoints) -> None:
    options: dict[str, Any] = {"max_num_batched_tokens": 11, "max_num_seqs": 8, "num_pages": 11}
    with small_engine(checkpoints(), **options) as small:
        outputs = small.generate(PROMPTS, PARAMS)
    assert_logprobs(checkpoints(), outputs)
    assert sum(output.preemptions for output in outputs) > 0


def test_rows_are_projected_in_slices(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "PROMPT_ROWS", 7)
    with small_engine(checkpoints()) as sliced:
        sizes: list[int] = []
        project = ParallelLMHead.partial

        def counting(head: ParallelLMHead, hidden: Any, rows: Any) -> Any:
            sizes.append(len(rows))
            return project(head, hidden, rows)

        monkeypatch.setattr(ParallelLMHead, "partial", counting)
        output = sliced.generate([LONG], WANTED)[0]
    rows = len(LONG) - 1
    assert sizes == [7] * (rows // 7) + [rows % 7] * (rows % 7 > 0) + [1] * 4
    assert output.prompt_logprobs is not None
    assert_entries(checkpoints(), LONG, 1, output.prompt_logprobs[1:], 1)


def test_such_a_prompt_takes_nothing_from_the_cache_but_gives(checkpoints: Checkpoints) -> None:
    plain = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with small_engine(checkpoints()) as caching:
        first = caching.generate([LONG], plain)[0]
        asked = [caching.generate([LONG], WANTED)[0] for _ in range(2)]
        caching.reset_prefix_cache()
        caching.generate([LONG], WANTED)
        last = caching.generate([LONG], plain)[0]
    assert [output.cached_tokens for output in asked] == [0, 0]
    assert last.cached_tokens == (len(LONG) - 1) // 8 * 8
    assert first.token_ids == last.token_ids
    for output in asked:
        assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(LONG)


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_a_prompt_preempted_on_its_way_computes_no_row_twice(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, prefix_cache: bool
) -> None:
    """Three short prompts decode and grow while chunks of the long one are computed."""
    rows: list[int] = []
    launch = Runner.launch

    def counting(runner: Runner, plan: Any, sampling: Any = None) -> Launched:
        rows.append(len(plan.prompt_rows))
        return launch(runner, plan, sampling)

    monkeypatch.setattr(Runner, "launch", counting)
    growing = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    options: dict[str, Any] = {"max_num_batched_tokens": 6, "max_num_seqs": 4, "num_pages": 12}
    with small_engine(checkpoints(), prefix_cache=prefix_cache, **options) as small:
        prompts, params = [[3, 4], [5, 6], [7, 8], LONG], [growing] * 3 + [WANTED]
        output = small.generate(prompts, params)[-1]
    assert output.preemptions == 1
    assert sum(rows) == len(LONG) - 1
    steps = [index for index, count in enumerate(rows) if count]
    assert steps != list(range(steps[0], steps[-1] + 1))  # it was away in between
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(LONG)
    assert_entries(checkpoints(), LONG, 1, output.prompt_logprobs[1:], 1)


def test_a_prompt_of_one_token_has_nothing_to_report(llm: LLM) -> None:
    assert llm.generate([[5]], WANTED)[0].prompt_logprobs == (None,)


def test_an_aborted_request_gets_no_entry_without_a_token() -> None:
    params = SamplingParams(logprobs=0)
    requests = [Request(str(i), [1, 2], params, seed=i, arrival_s=0.0) for i in range(2)]
    seqs = [ScheduledSeq(request, 0, 2, True) for request in requests]
    plan = SamplingPlan.from_schedule(seqs, 9, ())
    ids = torch.tensor([3, 4])
    launched = Launched(ids, plan, LogprobTensors.of(torch.zeros(2, 9), ids, 0))
    requests[1].output_ids.append(4)  # the other one was aborted while the step ran
    launched.keep_logprobs()
    assert requests[0].logprobs == []
    (entry,) = requests[1].logprobs
    assert entry == TokenLogprobs(4, pytest.approx(-np.log(9)), 5, ())
