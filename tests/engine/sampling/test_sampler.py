"""Sampler: the generator against published vectors, the race against float64, the frequencies
against softmax."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from engine.sampling import sampler
from engine.sampling.philox import philox4x32
from engine.sampling.sampler import Sampler
from tests.support.sampling import MASK, philox_reference, race_reference


def draw(
    logits: torch.Tensor, temperatures: list[float], seeds: list[int], positions: list[int]
) -> list[int]:
    ids = Sampler()(
        logits,
        torch.tensor(temperatures, dtype=torch.float32),
        torch.tensor(seeds, dtype=torch.int64),
        torch.tensor(positions, dtype=torch.int64),
    )
    assert ids.dtype == torch.int64
    assert ids.shape == (len(logits),)
    return ids.tolist()


# -- the generator ---------------------------------------------------------------------------------


# Random123, tests/kat_vectors, the three lines of "philox4x32 10".
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((MASK,) * 4, (MASK,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_known_answers(
    counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    assert philox_reference(counter, key) == words
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    got = philox4x32((c0, c1, c2, c3), (torch.tensor([key[0]]), torch.tensor([key[1]])))
    assert tuple(int(word) for word in got) == words


def test_many_counters_at_once() -> None:
    """101 of them, so that vectorised bodies and their scalar tails are both compared."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(0, 2**32, (6, 101), generator=generator)
    c0, c1, c2, c3, k0, k1 = numbers
    got = torch.stack(philox4x32((c0, c1, c2, c3), (k0, k1)), dim=1).tolist()
    rows = numbers.T.tolist()
    assert got == [list(philox_reference(tuple(row[:4]), (row[4], row[5]))) for row in rows]


# -- the race --------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab_size", [1, 2, 5, 64, 999])
def test_float64_reference_gives_the_same_ids(vocab_size: int) -> None:
    rows = 60
    generator = torch.Generator().manual_seed(vocab_size)
    logits = 3 * torch.randn(rows, vocab_size, generator=generator)
    temperatures = [[0.0, 0.3, 1.0, 1.7][i % 4] for i in range(rows)]
    seeds = [i * 0x123456789ABCDEF % 2**63 for i in range(rows)]
    positions = [i * 37 + (2**32 if i % 7 == 0 else 0) for i in range(rows)]
    ids = draw(logits, temperatures, seeds, positions)
    compared = 0
    for i in range(rows):
        exact = logits[i].double().numpy()
        temperature = float(np.float32(temperatures[i]))
        expected, lead = race_reference(exact, temperature, seeds[i], positions[i])
        if lead > 1e-4:  # float32 cannot tell closer ones apart
            assert ids[i] == expected, f"row {i}"
            compared += 1
    assert compared >= rows - 1


@pytest.mark.parametrize("temperature", [0.25, 0.7, 1.0, 2.0, 100.0])
def test_frequencies_follow_softmax(temperature: float) -> None:
    """20,000 positions of one seed; the noise is fixed, so the p-values are too."""
    count = 20_000
    logits = torch.linspace(-0.9, 0.9, 11)[torch.randperm(11, generator=_seeded(1))]
    ids = draw(logits.expand(count, -1), [temperature] * count, [1234] * count, list(range(count)))
    expected = torch.softmax(logits.double() / temperature, dim=0).numpy() * count
    assert expected.min() > 5
    assert stats.chisquare(np.bincount(ids, minlength=11), expected).pvalue > 0.01


def test_seeds_and_positions_are_independent_streams() -> None:
    """A 4 x 4 table of pairs of draws that differ in seed or in position alone is uniform."""
    count = 16_000
    flat = torch.zeros(count, 4)
    ones, positions = [1.0] * count, list(range(count))
    first = np.array(draw(flat, ones, [5] * count, positions))
    other_seed = np.array(draw(flat, ones, [6] * count, positions))
    next_position = np.array(draw(flat, ones, [5] * count, [p + 1 for p in positions]))
    high_seed = np.array(draw(flat, ones, [5 + 2**32] * count, positions))
    high_position = np.array(draw(flat, ones, [5] * count, [p + 2**32 for p in positions]))
    for other in (other_seed, next_position, high_seed, high_position):
        pairs = np.bincount(4 * first + other, minlength=16)
        assert stats.chisquare(pairs).pvalue > 0.01


# -- greedy and extreme rows -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_rows_of_a_mixed_batch_are_the_exact_argmax(dtype: torch.dtype) -> None:
    # Of 1,001 values bfloat16 makes many equal: the first index counts.
    logits = torch.randn(40, 1_001, generator=_seeded(2)).to(dtype)
    temperatures = [0.0 if i % 2 else 0.8 for i in range(40)]
    ids = draw(logits, temperatures, list(range(40)), list(range(40)))
    exact = logits.double().numpy().argmax(axis=1)  # numpy returns the first index
    assert [i for i in range(40) if ids[i] != exact[i] and temperatures[i] == 0] == []
    assert sum(ids[i] != exact[i] for i in range(40)) > 5  # the others do sample


def test_greedy_takes_the_first_of_equals() -> None:
    logits = torch.zeros(1, 50)
    logits[0, [13, 14, 44]] = 3.0
    assert draw(logits, [0.0], [0], [0]) == [13]


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-38, 1e-45])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_tiny_temperatures_are_the_argmax_of_separated_logits(
    temperature: float, scale: float
) -> None:
    logits = torch.stack([torch.randperm(301, generator=_seeded(i)) for i in range(20)]) * scale
    ids = draw(logits, [temperature] * 20, list(range(20)), list(range(20)))
    assert ids == logits.argmax(dim=-1).tolist()


def test_at_tiny_temperatures_equals_are_still_drawn_among() -> None:
    logits = torch.full((200, 9), -4.0)
    logits[:, [2, 7]] = 1.0
    ids = draw(logits, [1e-30] * 200, [3] * 200, list(range(200)))
    assert 70 < ids.count(2) < 130
    assert ids.count(2) + ids.count(7) == 200


def test_a_masked_token_is_never_drawn() -> None:
    logits = torch.zeros(500, 8)
    logits[:, 3:] = -torch.inf
    ids = draw(logits, [2.0] * 500, [0] * 500, list(range(500)))
    assert set(ids) == {0, 1, 2}


def test_the_most_extreme_random_words_give_finite_scores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """k = 2^32 - 1 is u = 1 in float32, hence E = inf and a score of -inf, if it is not held back;
    k = 0 is the best score that there is."""
    words = tuple(torch.tensor([[word]]) for word in (MASK, MASK - 127, 2**31, 0))
    monkeypatch.setattr(sampler, "philox4x32", lambda counter, key: words)
    seeds = torch.zeros(1, dtype=torch.int64)
    exponential = sampler._exponential(seeds, seeds, 4)[0].double().numpy()
    exact = -np.log1p(-(np.array([2**32 - 2**8, 2**32 - 2**8, 2**31 + 0.5, 0.5]) / 2**32))
    np.testing.assert_allclose(exponential, exact, rtol=1e-6)
    assert draw(torch.tensor([[50.0, 0.0, 0.0, 0.0]]), [1.0], [0], [0]) == [0]
    assert draw(torch.tensor([[0.0, 0.0, 0.0, 0.0]]), [1.0], [0], [0]) == [3]


# -- what a row depends on -------------------------------------------------------------------------


@pytest.mark.parametrize("vocab_size", [64, 333])
def test_a_row_does_not_depend_on_its_batch(vocab_size: int) -> None:
    rows = 24
    logits = torch.randn(rows, vocab_size, generator=_seeded(4))
    temperatures = [[0.0, 0.6, 1.3][i % 3] for i in range(rows)]
    seeds, positions = [7 * i for i in range(rows)], [3 * i for i in range(rows)]
    together = draw(logits, temperatures, seeds, positions)
    alone = [
        draw(logits[i : i + 1], temperatures[i : i + 1], seeds[i : i + 1], positions[i : i + 1])[0]
        for i in range(rows)
    ]
    assert alone == together
    order = torch.randperm(rows, generator=_seeded(5)).tolist()
    shuffled = draw(
        logits[order],
        [temperatures[i] for i in order],
        [seeds[i] for i in order],
        [positions[i] for i in order],
    )
    assert shuffled == [together[i] for i in order]


def test_noise_belongs_to_a_token_whatever_the_vocabulary() -> None:
    """Masked padding columns change nothing, so a padded vocabulary samples the same ids."""
    logits = torch.randn(50, 37, generator=_seeded(6))
    padded = torch.cat([logits, torch.full((50, 11), -torch.inf)], dim=1)
    arguments = [1.0] * 50, list(range(50)), list(range(50))
    assert draw(padded, *arguments) == draw(logits, *arguments)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_sample_as_their_float32_values(dtype: torch.dtype) -> None:
    logits = torch.randn(2_000, 130, generator=_seeded(7)).to(dtype)
    arguments = [0.9] * 2_000, list(range(2_000)), list(range(2_000))
    assert draw(logits, *arguments) == draw(logits.float(), *arguments)


def test_one_graph_without_a_look_at_the_values() -> None:
    """Captured and compiled forms need it: no branch on a temperature, no synchronisation."""
    traced = torch.compile(Sampler(), backend="eager", fullgraph=True)
    logits = torch.randn(6, 30, generator=_seeded(8))
    temperatures = torch.tensor([0.0, 0.5, 1.0, 0.0, 2.0, 1e-6])
    numbers = torch.arange(6)
    ids = traced(logits, temperatures, numbers, numbers).tolist()
    assert ids == draw(logits, temperatures.tolist(), list(range(6)), list(range(6)))


def test_no_rows() -> None:
    assert draw(torch.empty(0, 16), [], [], []) == []


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
