"""Collectives as operators: what they write is what their schemas say, traced or not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from engine.comm import Communicator, Site


class Doubles(Communicator):
    """A rank whose collectives change what they are given, as sums of two equal ranks would."""

    path = "doubles"

    def __init__(self) -> None:
        super().__init__(rank=0, world=2)

    def _all_reduce(self, x: torch.Tensor) -> None:
        x.mul_(2)

    def _gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(torch.stack([x, x]))

    def _broadcast(self, x: torch.Tensor) -> None:
        x.add_(1)

    def barrier(self) -> None: ...


@pytest.fixture
def comm() -> Iterator[Doubles]:
    comm = Doubles()
    yield comm
    comm.close()


@pytest.mark.parametrize("name", ["all_reduce", "gather", "broadcast"])
def test_an_operator_mutates_what_its_schema_says(name: str, comm: Doubles) -> None:
    """Were a write not declared, a compiler could drop the collective or read what stood there
    before. opcheck compares schema, eager result and traced result."""
    x = torch.randn(3, 4)
    tensors = (x, torch.empty(2, 3, 4)) if name == "gather" else (x,)
    operator = getattr(torch.ops.rangefinder, name)
    written = [a.alias_info is not None and a.alias_info.is_write
               for a in operator.default._schema.arguments]  # fmt: skip
    assert written == [False] * (len(tensors) - 1) + [True, False, False]
    torch.library.opcheck(operator, (*tensors, comm.key, int(Site.EMBED)))


def test_traced_code_keeps_collectives_in_order_and_on_their_values(comm: Doubles) -> None:
    """In a row on one tensor, between arithmetic, and one whose result is not used by name."""

    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = comm.all_reduce(x + 1, Site.EMBED)
        second = comm.all_reduce(first * 3, Site.ATTN_O_PROJ)
        comm.broadcast(second, Site.TOKEN_IDS)
        comm.all_reduce(second, Site.MLP_DOWN_PROJ)
        logits = comm.gather(second, Site.LM_HEAD)
        assert logits is not None
        return first, logits

    traced = torch.compile(step, fullgraph=True, backend="aot_eager")
    for value in (1.0, 5.0):
        x = torch.full((2, 3), value)
        whole = 2 * (3 * 2 * (value + 1) * 2 + 1)
        first, logits = traced(x)
        assert torch.equal(first, torch.full((2, 3), 2 * (value + 1)))
        assert torch.equal(logits, torch.full((2, 6), whole))
        assert torch.equal(x, torch.full((2, 3), value))
