"""Top-k, top-p and min-p: against float64, transformers' warpers and the filtered distribution."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from engine.sampling import filters
from engine.sampling.filters import keep_most_probable
from engine.sampling.sampler import Sampler
from tests.support.sampling import keep_reference

V = 211


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def keep(
    logits: torch.Tensor,
    temperature: float | list[float] = 1.0,
    top_k: int | list[int] | None = None,
    top_p: float | list[float] = 1.0,
    min_p: float | list[float] = 0.0,
) -> torch.Tensor:
    """-> [F, V] bool, which tokens stay; numbers stand for every row."""

    def column(value: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(value if isinstance(value, list) else [value] * len(logits)).to(dtype)

    k = column(logits.shape[1] if top_k is None else top_k, torch.int64)
    kept = keep_most_probable(
        logits,
        column(temperature, torch.float32),
        k,
        column(top_p, torch.float64),
        column(min_p, torch.float64),
        int(k.max()),
    )
    finite = kept.isfinite()
    assert torch.equal(kept[finite], logits[finite])
    assert (kept[~finite] == -torch.inf).all()
    return finite


@pytest.mark.parametrize("small_k", [1024, 0])  # by selection, by sorting
def test_float64_by_the_definition_keeps_the_same_tokens(
    small_k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filters, "SMALL_K", small_k)
    rows = 120
    logits = 2.5 * torch.randn(rows, V, generator=seeded(0))
    rng = random.Random(0)
    temperatures = rng.choices([0.3, 1.0, 1.7], k=rows)
    ks = rng.choices([1, 5, 40, 150, V], k=rows)
    ps = rng.choices([0.05, 0.5, 0.9, 0.999, 1.0, 1.0], k=rows)
    ms = rng.choices([0.0, 0.0, 0.02, 0.3, 1.0], k=rows)
    found = keep(logits, temperatures, ks, ps, ms).numpy()
    sizes = set()
    for i, row in enumerate(logits.double().numpy()):
        expected = keep_reference(row, temperatures[i], ks[i], ps[i], ms[i])
        np.testing.assert_array_equal(found[i], expected, err_msg=f"row {i}")
        sizes.add(int(expected.sum()))
    assert len(sizes) > 20 and min(sizes) == 1 and max(sizes) > 100


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(7, 1.0, 0.0), (V, 0.8, 0.0),
                         (V, 1.0, 0.1), (20, 0.95, 0.0), (50, 0.9, 0.05)])  # fmt: skip
def test_the_tokens_of_transformers(seed: int, top_k: int, top_p: float, min_p: float) -> None:
    from transformers import (
        LogitsProcessorList,
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    warpers = LogitsProcessorList(
        [
            TemperatureLogitsWarper(0.7),
            TopKLogitsWarper(top_k),
            TopPLogitsWarper(top_p),
            MinPLogitsWarper(min_p),
        ]
    )
    logits = 2 * torch.randn(16, V, generator=seeded(seed))
    theirs = warpers(torch.zeros(16, 1, dtype=torch.long), logits.clone()).isfinite()
    assert torch.equal(keep(logits, 0.7, top_k, top_p, min_p), theirs)


def test_of_equals_the_lower_ids_stay() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 2.0, -1.0, 3.0]])
    order = [1, 3, 7, 2, 4, 5, 0, 6]
    for k in range(1, 9):
        assert keep(logits, top_k=k)[0].nonzero().flatten().tolist() == sorted(order[:k])
    flat = torch.zeros(1, 10)
    assert keep(flat, top_p=0.35)[0].nonzero().flatten().tolist() == [0, 1, 2, 3]
    assert keep(flat, top_p=0.5)[0].sum() == 5  # five tenths hold a half
    assert keep(flat, min_p=1.0).all()
    # Zeros of both signs are equals.
    assert keep(torch.tensor([[0.0, -0.0, 0.0]]), top_k=2).tolist() == [[True, True, False]]


def test_bf16_rounding_makes_many_equals_and_exactly_k_stay() -> None:
    logits = (4 * torch.randn(9, 4000, generator=seeded(3))).bfloat16().float()
    assert len(logits[0].unique()) < 1500
    for k in (1, 20, 777, 2500):
        kept = keep(logits, top_k=k)
        assert kept.sum(dim=1).tolist() == [k] * 9
        for row, mask in zip(logits.double().numpy(), kept.numpy(), strict=True):
            np.testing.assert_array_equal(mask, keep_reference(row, 1.0, k, 1.0, 0.0))


def test_one_token_always_stays() -> None:
    logits = torch.randn(3, V, generator=seeded(4))
    logits[1, 5:] = -torch.inf
    best = logits.argmax(dim=1)
    for limits in ({"top_k": 1}, {"top_p": 1e-300}, {"min_p": 1.0}):
        kept = keep(logits, **limits)  # type: ignore[arg-type]
        assert torch.equal(kept.nonzero()[:, 1], best)
    # Temperatures that float32 makes zero, or whose quotients it makes infinite.
    for temperature in (0.0, 1e-38, 1e-30, 1e30):
        assert keep(logits, temperature, top_p=0.5)[torch.arange(3), best].all()


def test_a_row_without_numbers_reads_nothing_outside() -> None:
    nan = torch.full((1, V), torch.nan)
    arguments = [torch.ones(1), torch.tensor([5]), torch.ones(1).double(), torch.zeros(1).double()]
    assert not keep_most_probable(nan, *arguments, 5).isfinite().any()


def test_masked_tokens_count_for_nothing() -> None:
    logits = torch.randn(4, V, generator=seeded(5))
    shorter = logits[:, :100]
    logits[:, 100:] = -torch.inf
    for limits in ({"top_k": 30}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 150}):
        assert torch.equal(keep(logits, **limits)[:, :100], keep(shorter, **limits))  # type: ignore[arg-type]


@pytest.mark.parametrize("small_k", [1024, 0])
def test_a_row_does_not_depend_on_its_batch(small_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor on the way that its neighbours' k takes: selection and sorting keep the same."""
    rows = 31
    logits = (3 * torch.randn(rows, 5000, generator=seeded(6))).bfloat16().float()
    columns = {
        "temperature": [[0.4, 0.9, 1.5][i % 3] for i in range(rows)],
        "top_k": [[3, 64, 1000][i % 3] for i in range(rows)],
        "top_p": [[0.3, 0.9, 1.0, 0.99][i % 4] for i in range(rows)],
        "min_p": [[0.0, 0.1][i % 2] for i in range(rows)],
    }
    together = keep(logits, **columns)  # type: ignore[arg-type]
    monkeypatch.setattr(filters, "SMALL_K", small_k)
    for i in range(rows):
        alone = {name: values[i] for name, values in columns.items()}
        assert torch.equal(keep(logits[i : i + 1], **alone)[0], together[i]), f"row {i}"  # type: ignore[arg-type]


def test_sampling_with_filters_that_keep_all_is_plain_sampling() -> None:
    rows = 300
    logits = torch.randn(rows, V, generator=seeded(7))
    logits[:, 0] = -200.0  # its mass rounds to zero, but it stays
    assert keep(logits).all()
    numbers = torch.arange(rows)
    filtered = torch.where(keep(logits), logits, -torch.inf)
    arguments = torch.full((rows,), 0.8), numbers, numbers
    assert torch.equal(Sampler()(filtered, *arguments), Sampler()(logits, *arguments))


@pytest.mark.parametrize("limits", [{"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.25},
                                    {"top_k": 8, "top_p": 0.9, "min_p": 0.1}])  # fmt: skip
def test_frequencies_follow_the_filtered_distribution(limits: dict[str, float]) -> None:
    """20,000 positions of one seed; the noise is fixed, so the p-values are too."""
    count, size, temperature = 20_000, 11, 0.9
    logits = torch.linspace(-1.5, 1.5, size)[torch.randperm(size, generator=seeded(8))]
    many = logits.expand(count, -1)
    full = {"top_k": size, "top_p": 1.0, "min_p": 0.0, **limits}
    kept = keep_reference(logits.double().numpy(), temperature, **full)  # type: ignore[arg-type]
    assert 1 < kept.sum() < size
    masked = torch.where(keep(many, temperature, **limits), many, -torch.inf)  # type: ignore[arg-type]
    ids = Sampler()(
        masked, torch.full((count,), temperature), torch.full((count,), 99), torch.arange(count)
    )
    p = np.exp(logits.double().numpy() / temperature) * kept
    counts = np.bincount(ids.numpy(), minlength=size)
    assert counts[~kept].sum() == 0
    assert stats.chisquare(counts[kept], count * (p / p.sum())[kept]).pvalue > 0.01
