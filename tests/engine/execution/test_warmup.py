"""What runs before a rank serves: prompts and decode steps of every kernel, on the dummy page."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.attention.triton_paged import num_splits
from engine.config import EngineConfig, ResolvedConfig
from engine.execution.warmup import warmup_steps
from engine.graph_shapes import bucket_sizes
from engine.inputs.buffers import BatchBuffers
from engine.resolve import resolve
from engine.shape import ModelShape
from tests.support.checkpoints import Checkpoints

PAGES, PAGE = 9, 4


@pytest.fixture
def config(checkpoints: Checkpoints) -> ResolvedConfig:
    path = checkpoints()
    asked = EngineConfig(
        model=str(path), device="cpu", enforce_eager=True, max_num_seqs=40, max_model_len=64,
        num_pages=PAGES, page_size=PAGE,
    )  # fmt: skip
    return resolve(asked, ModelShape.from_hf(path))


def steps_of(config: ResolvedConfig) -> list[tuple[list[int], int]]:
    """Of each step host_meta and the rows that sample; checks where K and V go and what is read."""
    buffers = BatchBuffers(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        page_size=PAGE,
        dummy_page=PAGES,
        device=torch.device("cpu"),
    )
    found = []
    for batch, rows in warmup_steps(config, buffers, (2, 1)):
        meta = batch.host_meta.tolist()
        assert set((batch.slot_mapping // PAGE).tolist()) == {PAGES}
        assert not batch.input_ids.any() and int(batch.positions.max()) < config.max_model_len
        assert int(batch.seq_lens[: meta[0]].max()) == meta[2]
        assert len(batch.logits_indices) == len(rows.slots)
        found.append((meta, len(rows.slots)))
    return found


def test_prompts_alone_on_a_cpu(config: ResolvedConfig) -> None:
    assert steps_of(config) == [([1, 2, 2, 0], 1), ([1, 1, 1, 0], 1)]


def test_own_products_add_prompts(config: ResolvedConfig) -> None:
    """Of 64 tokens and of 65, which is two sequences of at most 64."""
    found = steps_of(replace(config, linear="triton"))[2:]
    assert [meta[:2] for meta, _ in found] == [[1, 1], [1, 16], [1, 32], [1, 64], [2, 64]]


def test_without_graphs_decode_steps_of_every_kernel(config: ResolvedConfig) -> None:
    on_gpu = replace(config, device="cuda")
    found = steps_of(on_gpu)[2:]
    assert found == [([n, 1, 1, n], n) for n in (1, 2, 4, 8, 16, 32, 40)]
    assert steps_of(replace(on_gpu, enforce_eager=False)) == steps_of(config)


@pytest.mark.parametrize("kv_heads", [1, 2, 8, 20, 40, 64])
def test_sizes_leave_no_kernel_out(kv_heads: int) -> None:
    pytest.importorskip("triton")
    from engine.kernels.decode_triton import NARROW

    def kernel(seqs: int) -> tuple[bool, bool]:
        splits = num_splits(seqs, kv_heads)
        return splits > 1, kv_heads * seqs * splits in NARROW

    for most in (1, 3, 12, 65, 256, 700):
        built = {kernel(seqs) for seqs in bucket_sizes(most)}
        assert {kernel(seqs) for seqs in range(1, most + 1)} == built
