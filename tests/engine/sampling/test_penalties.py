"""Penalties: against transformers and float64; counting on the device equals rebuilding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from engine.sampling.penalties import PenaltyState
from tests.support.sampling import penalty_reference

V, SLOTS = 50, 4


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def doubles(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def state(slot: int, prompt: list[int], output: list[int]) -> PenaltyState:
    made = PenaltyState(SLOTS, V, torch.device("cpu"))
    rebuild(made, slot, prompt, output)
    return made


def rebuild(made: PenaltyState, slot: int, prompt: list[int], output: list[int]) -> None:
    of = [(ints(*[slot] * len(tokens)), ints(*tokens)) for tokens in (prompt, output)]
    made.rebuild(ints(slot), *of)


def logits_of(rows: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(rows, V, generator=torch.Generator().manual_seed(seed))


PROMPT, OUTPUT = [3, 9, 9, 30, 7], [9, 4, 4, 4, 11]


@pytest.mark.parametrize("penalty", [1.3, 0.6, 5.0])
def test_repetition_is_that_of_transformers(penalty: float) -> None:
    logits = logits_of(1)
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(ints(*PROMPT, *OUTPUT)[None], logits.clone())
    ours = state(2, PROMPT, OUTPUT).apply(logits, ints(2), doubles(penalty), doubles(0), doubles(0))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    assert not torch.equal(ours, logits)


@pytest.mark.parametrize(
    "penalties", [(1.0, 0.7, 0.0), (1.0, 0.0, 0.4), (1.2, -0.5, 0.3), (0.8, 1.5, -0.2)]
)
def test_float64(penalties: tuple[float, float, float]) -> None:
    logits = logits_of(1, seed=1)
    found = state(0, PROMPT, OUTPUT).apply(logits, ints(0), *map(doubles, penalties))
    expected = penalty_reference(logits[0].double().numpy(), PROMPT, OUTPUT, *penalties)
    np.testing.assert_allclose(found[0].numpy(), expected, rtol=1e-6, atol=1e-6)


def test_rows_have_their_own_slots_and_penalties() -> None:
    made = state(0, PROMPT, OUTPUT)
    rebuild(made, 3, [1, 2], [])
    logits = logits_of(2, seed=2)
    columns = doubles(1.1, 2.0), doubles(0.5, 0.0), doubles(0.0, 0.25)
    found = made.apply(logits, ints(3, 0), *columns)
    exact = logits.double().numpy()
    np.testing.assert_allclose(
        found[0].numpy(),
        penalty_reference(exact[0], [1, 2], [], 1.1, 0.5, 0.0),
        rtol=1e-6,
        atol=1e-6,
    )
    np.testing.assert_allclose(
        found[1].numpy(),
        penalty_reference(exact[1], PROMPT, OUTPUT, 2.0, 0.0, 0.25),
        rtol=1e-6,
        atol=1e-6,
    )


def test_counting_step_by_step_equals_rebuilding() -> None:
    counted = state(1, PROMPT, [])
    for token in OUTPUT:
        counted.count(ints(1, 2), ints(token, 40))
    logits = logits_of(1, seed=3)
    arguments = logits, ints(1), doubles(1.4), doubles(0.3), doubles(0.2)
    assert torch.equal(counted.apply(*arguments), state(1, PROMPT, OUTPUT).apply(*arguments))


def test_a_slot_forgets_its_last_owner_and_its_neighbour_does_not() -> None:
    made = state(1, PROMPT, OUTPUT)
    rebuild(made, 2, PROMPT, OUTPUT)
    rebuild(made, 1, [8], [])
    logits = logits_of(1, seed=4)
    columns = doubles(1.4), doubles(0.3), doubles(0.2)
    fresh = state(1, [8], []).apply(logits, ints(1), *columns)
    assert torch.equal(made.apply(logits, ints(1), *columns), fresh)
    kept = state(2, PROMPT, OUTPUT).apply(logits, ints(2), *columns)
    assert torch.equal(made.apply(logits, ints(2), *columns), kept)


def test_the_largest_penalties_stay_finite() -> None:
    logits = torch.tensor([[1e5, -1e5] + [0.0] * (V - 2)])
    for repetition in (1e30, 1e-30):
        for other in (1e30, -1e30):
            found = state(0, [0, 1], [0, 1] * 50).apply(
                logits, ints(0), doubles(repetition), doubles(other), doubles(other)
            )
            assert found.isfinite().all()
