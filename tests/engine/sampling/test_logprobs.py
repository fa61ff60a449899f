"""Log-probabilities: against float64 log-softmax; ranks and alternatives among equals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.special import log_softmax

from engine.requests.request import TokenLogprobs
from engine.sampling.logprobs import LogprobTensors
from engine.sampling.step_sampler import StepSampler


def entries(
    logits: torch.Tensor, tokens: list[int], tops: list[int] | None = None
) -> list[TokenLogprobs]:
    tops = [3] * len(tokens) if tops is None else tops
    found = StepSampler.report(logits, torch.tensor(tokens), max(tops))
    return list(found.read(tops))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float64(dtype: torch.dtype) -> None:
    """70 rows: more than are worked on at once."""
    rows, vocab = 70, 333
    generator = torch.Generator().manual_seed(0)
    logits = (8 * torch.randn(rows, vocab, generator=generator)).to(dtype)
    tokens = torch.randint(0, vocab, (rows,), generator=generator).tolist()
    exact = log_softmax(logits.double().numpy(), axis=1)
    for row, (token, entry) in enumerate(zip(tokens, entries(logits, tokens), strict=True)):
        order = np.lexsort((np.arange(vocab), -exact[row]))
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(exact[row][token], rel=1e-6, abs=1e-5)
        assert entry.rank == 1 + order.tolist().index(token)
        assert [t for t, _ in entry.top] == order[:3].tolist()
        found = [value for _, value in entry.top]
        np.testing.assert_allclose(found, exact[row][order[:3]], rtol=1e-6, atol=1e-5)


def test_of_equals_the_lower_ids_come_first() -> None:
    logits = torch.tensor([[0.0, 2.0, -1.0, 2.0, -0.0, 2.0]])
    order = [1, 3, 5, 0, 4, 2]
    for rank, token in enumerate(order, 1):
        (entry,) = entries(logits, [token], [6])
        assert entry.rank == rank
        assert [t for t, _ in entry.top] == order
        assert entry.top[rank - 1] == (token, entry.logprob)


def test_each_row_reports_as_many_as_it_asks_for() -> None:
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(1))
    found = entries(logits, [0, 1, 2, 3], [0, 2, 64, 1])
    assert [len(entry.top) for entry in found] == [0, 2, 9, 1]
    total = sum(np.exp(value) for _, value in found[2].top)
    assert total == pytest.approx(1.0, abs=1e-6)


def test_large_and_masked_logits() -> None:
    logits = torch.tensor([[1e4, 0.0, -torch.inf], [-1e4, -1e4, -1e4]])
    certain, even = entries(logits, [0, 2])
    assert (certain.logprob, certain.rank) == (0.0, 1)
    assert certain.top == ((0, 0.0), (1, -1e4), (2, -np.inf))
    assert even.logprob == pytest.approx(-np.log(3), abs=1e-6) and even.rank == 3


def test_parts_are_joined_in_order() -> None:
    logits = torch.randn(5, 9, generator=torch.Generator().manual_seed(2))
    tokens = torch.arange(5)
    parts = [LogprobTensors.of(logits[s], tokens[s], 2) for s in (slice(0, 3), slice(3, 5))]
    whole = LogprobTensors.of(logits, tokens, 2)
    assert list(LogprobTensors.joined(parts).read([2] * 5)) == list(whole.read([2] * 5))
