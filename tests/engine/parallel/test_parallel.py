"""Sharded layers over 1, 2 and 4 ranks against the same matrices unsharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from engine.comm import Communicator, Kind, Site, SoloCommunicator
from engine.errors import ConfigError
from engine.parallel import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from engine.sampling.sampler import Sampler
from engine.weights import checkpoint_tensors
from tests.support.threads import Recorder, run_ranks

F32: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
Tensors = dict[str, torch.Tensor]


def filled(layer: nn.Module, tensors: Tensors, name: str = "it") -> Any:
    """`layer` under `name` in a parent, loaded with exactly the tensors it asks for."""
    for parameter in layer.parameters():
        parameter.fill_(float("nan"))
    wanted = checkpoint_tensors(nn.ModuleDict({name: layer}))
    assert wanted.keys() == tensors.keys()
    for key, tensor in wanted.items():
        assert tensor.shape == tuple(tensors[key].shape)
        tensor.fill(tensors[key])
    assert not any(parameter.isnan().any() for parameter in layer.parameters())
    return layer


def randn(*names_and_sizes: tuple[str, tuple[int, ...]]) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(size, generator=generator) for name, size in names_and_sizes}


def over_ranks(tp: int, run: Callable[[Communicator], torch.Tensor]) -> list[torch.Tensor]:
    return run_ranks(tp, run)


def test_replicated_linear() -> None:
    tensors = randn(("it.weight", (6, 8)), ("it.bias", (6,)))
    layer = filled(ReplicatedLinear(8, 6, bias=True, **F32), tensors)
    x = torch.randn(3, 8)
    assert torch.equal(layer(x), F.linear(x, tensors["it.weight"], tensors["it.bias"]))


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("bias", [True, False])
def test_column_parallel_holds_blocks_of_rows(tp: int, bias: bool) -> None:
    tensors = randn(("it.weight", (12, 8)), *[("it.bias", (12,))] * bias)
    x = torch.randn(3, 8)
    expected = F.linear(x, tensors["it.weight"], tensors.get("it.bias"))

    def on_rank(comm: Communicator) -> torch.Tensor:
        return filled(ColumnParallelLinear(8, 12, comm, bias=bias, **F32), tensors)(x)

    torch.testing.assert_close(torch.cat(over_ranks(tp, on_rank), dim=1), expected)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_merged_column_parallel_places_each_piece(tp: int) -> None:
    tensors = randn(
        ("gate.weight", (8, 6)), ("gate.bias", (8,)), ("up.weight", (12, 6)), ("up.bias", (12,))
    )
    x = torch.randn(3, 6)

    def on_rank(comm: Communicator) -> torch.Tensor:
        layer = MergedColumnParallelLinear(6, {"gate": 8, "up": 12}, comm, bias=True, **F32)
        return filled(layer, tensors, "gate_up")(x)

    for rank, local in enumerate(over_ranks(tp, on_rank)):
        gate, up = local.split([8 // tp, 12 // tp], dim=1)
        for piece, name in ((gate, "gate"), (up, "up")):
            whole = F.linear(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"])
            torch.testing.assert_close(piece, whole.chunk(tp, dim=1)[rank])


@pytest.mark.parametrize(
    ("tp", "kv_heads", "held"),
    [
        (1, 2, [(0, 1)]),
        (2, 2, [(0,), (1,)]),
        (4, 4, [(0,), (1,), (2,), (3,)]),
        (4, 2, [(0,), (0,), (1,), (1,)]),  # fewer KV heads than ranks: replicated
        (4, 1, [(0,), (0,), (0,), (0,)]),
    ],
)
def test_qkv_parallel_splits_by_heads(tp: int, kv_heads: int, held: list[tuple[int, ...]]) -> None:
    heads, head_dim, hidden = 8, 3, 5
    sizes = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim}
    tensors = randn(
        *((f"{n}_proj.weight", (size, hidden)) for n, size in sizes.items()),
        *((f"{n}_proj.bias", (size,)) for n, size in sizes.items()),
    )
    x = torch.randn(4, hidden)
    whole = {
        n: F.linear(x, tensors[f"{n}_proj.weight"], tensors[f"{n}_proj.bias"]).unflatten(
            1, (-1, head_dim)
        )
        for n in sizes
    }

    def on_rank(comm: Communicator) -> torch.Tensor:
        layer = QKVParallelLinear(hidden, heads, kv_heads, head_dim, comm, bias=True, **F32)
        assert (layer.num_heads, layer.num_kv_heads) == (heads // tp, len(held[comm.rank]))
        q, k, v = filled(layer, tensors, "qkv_proj")(x).split(
            [layer.q_size, layer.kv_size, layer.kv_size], dim=1
        )
        return torch.cat([part.unflatten(1, (-1, head_dim)) for part in (q, k, v)], dim=1)

    for rank, local in enumerate(over_ranks(tp, on_rank)):
        kv = list(held[rank])
        queries = whole["q"][:, rank * heads // tp : (rank + 1) * heads // tp]
        expected = torch.cat([queries, whole["k"][:, kv], whole["v"][:, kv]], dim=1)
        torch.testing.assert_close(local, expected)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("bias", [True, False])
def test_row_parallel_sums_and_adds_the_bias_once(tp: int, bias: bool) -> None:
    tensors = randn(("it.weight", (6, 12)), *[("it.bias", (6,))] * bias)
    x = torch.randn(3, 12)
    expected = F.linear(x, tensors["it.weight"], tensors.get("it.bias"))

    def on_rank(comm: Communicator) -> torch.Tensor:
        layer = RowParallelLinear(12, 6, comm, Site.MLP_DOWN_PROJ, bias=bias, **F32)
        mine = x.chunk(tp, dim=1)[comm.rank]
        filled(layer, tensors)
        return torch.stack([layer(mine), layer.partial(mine)])

    results = over_ranks(tp, on_rank)
    for summed, _ in results:
        torch.testing.assert_close(summed, expected)
    torch.testing.assert_close(sum(partial for _, partial in results), expected)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("vocab", [16, 13])
def test_vocab_parallel_embedding(tp: int, vocab: int) -> None:
    """With 13 rows and 4 ranks the last rank owns one row and three of padding."""
    tensors = randn(("it.weight", (vocab, 5)))
    ids = torch.tensor([0, vocab - 1, 3, 4, 7, 8, 3])

    def on_rank(comm: Communicator) -> torch.Tensor:
        return filled(VocabParallelEmbedding(vocab, 5, comm, **F32), tensors)(ids)

    for embedded in over_ranks(tp, on_rank):
        assert torch.equal(embedded, tensors["it.weight"][ids])


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("vocab", [16, 13, 9])
@pytest.mark.parametrize("rows", [[4], [2, 0], [0, 2, 4]])
def test_lm_head_gathers_the_rows_asked_for(tp: int, vocab: int, rows: list[int]) -> None:
    """9 rows over 4 ranks: three a rank, so that the last rank owns none."""
    tensors = randn(("it.weight", (vocab, 5)))
    hidden = torch.randn(5, 5)

    def on_rank(comm: Communicator) -> torch.Tensor | None:
        head = filled(ParallelLMHead(vocab, 5, comm, **F32), tensors)
        return head(hidden, torch.tensor(rows))

    root, *others = run_ranks(tp, on_rank)
    assert others == [None] * (tp - 1)
    assert root is not None
    torch.testing.assert_close(root, F.linear(hidden[rows], tensors["it.weight"]))


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_padding_of_the_vocabulary_is_never_sampled(tp: int) -> None:
    """All 9 logits are negative, so that a padding column, whose logit is 0, would win every greedy
    row and most others; sampled ids are those of one rank."""
    weight = torch.rand(9, 5, generator=torch.Generator().manual_seed(0)) + 1
    hidden = -torch.ones(200, 5)
    temperatures = torch.tensor([0.0, 1.0, 1e4, 1e-6]).repeat(50)
    rows = torch.arange(200)

    def on_rank(comm: Communicator) -> list[int] | None:
        head = filled(ParallelLMHead(9, 5, comm, **F32), {"it.weight": weight})
        logits = head(hidden, rows)
        return None if logits is None else Sampler()(logits, temperatures, rows, rows).tolist()

    ids = run_ranks(tp, on_rank)[0]
    assert ids is not None and max(ids) == 8
    assert ids == run_ranks(1, on_rank)[0]
    assert ids[::4] == [int(F.linear(hidden[0], weight).argmax())] * 50


def test_lm_head_without_rows_gathers_nothing() -> None:
    def on_rank(comm: Communicator) -> list[Kind]:
        recorder = Recorder()
        comm.attach([recorder])
        head = filled(ParallelLMHead(8, 5, comm, **F32), randn(("it.weight", (8, 5))))
        assert head(torch.randn(3, 5), torch.empty(0, dtype=torch.int64)) is None
        head(torch.randn(3, 5), torch.tensor([1]))
        return [c.kind for c in recorder.collectives]

    assert run_ranks(2, on_rank) == [[Kind.GATHER]] * 2


def test_tied_head_has_no_weight_of_its_own() -> None:
    comm = SoloCommunicator()
    embedding = VocabParallelEmbedding(9, 5, comm, **F32)
    head = ParallelLMHead(9, 5, comm, **F32, shared_with=embedding)
    both = nn.ModuleDict({"embed": embedding, "head": head})
    assert head.weight.data_ptr() == embedding.weight.data_ptr()
    assert list(checkpoint_tensors(both)) == ["embed.weight"]
    assert len(list(both.parameters())) == 1


@pytest.mark.parametrize(
    "build",
    [
        lambda comm: ColumnParallelLinear(8, 13, comm, bias=False, **F32),
        lambda comm: MergedColumnParallelLinear(8, {"a": 12, "b": 13}, comm, bias=False, **F32),
        lambda comm: RowParallelLinear(13, 8, comm, Site.MLP_DOWN_PROJ, bias=False, **F32),
        lambda comm: QKVParallelLinear(8, 3, 3, 4, comm, bias=False, **F32),
        lambda comm: QKVParallelLinear(8, 4, 3, 4, comm, bias=False, **F32),
    ],
)
def test_uneven_shares_are_refused(build: Any) -> None:
    with pytest.raises(ConfigError, match=r"tp=2: .* cannot be split evenly"):
        run_ranks(2, build)
