"""Checkpoints: filled exactly or refused, only a shard read; dummies alike at every TP size."""

from __future__ import annotations

import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine import weights
from engine.checkpoint import FileTensor
from engine.comm import Communicator, SoloCommunicator
from engine.weights import checkpoint_tensors, load_weights
from tests.support.checkpoints import Checkpoints, reference_logits
from tests.support.models import LoneRank, loaded, logits_of, nan_model
from tests.support.threads import run_ranks

IDS = [3, 96, 0, 41, 17]


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tied": True, "attention_bias": True, "num_kv_heads": 1},
        {"model_type": "qwen2", "hidden_size": 32, "head_dim": 8},
    ],
)
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_every_parameter_is_filled(
    checkpoints: Checkpoints, changes: dict[str, Any], tp: int, load_format: str
) -> None:
    path = checkpoints(**changes)

    def on_rank(comm: Communicator) -> None:
        model = nan_model(path, comm)
        load_weights(model, path, load_format=load_format)
        for name, parameter in model.named_parameters():
            assert not parameter.isnan().any(), name

    run_ranks(tp, on_rank)


def test_several_files(checkpoints: Checkpoints) -> None:
    path = checkpoints(max_shard_size="20KB")
    assert len(list(path.glob("model-*-of-*.safetensors"))) > 2
    expected = reference_logits(path, IDS)
    for tp in (1, 2):
        [logits] = logits_of(path, [IDS], [{0: len(IDS)}], tp=tp)
        assert (logits - expected).abs().max() < 1e-4


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtype_is_converted(checkpoints: Checkpoints, stored: str, dtype: torch.dtype) -> None:
    path = checkpoints(dtype=stored, attention_bias=True)
    model = nan_model(path, SoloCommunicator(), dtype)
    load_weights(model, path)
    file = load_file(path / "model.safetensors")
    attention = model.model.layers[1].self_attn
    prefix = "model.layers.1.self_attn"
    for kind in ("weight", "bias"):
        qkv = torch.cat([file[f"{prefix}.{n}_proj.{kind}"] for n in "qkv"])
        assert qkv.dtype == getattr(torch, stored)
        assert torch.equal(getattr(attention.qkv_proj, kind), qkv.to(dtype))
    assert torch.equal(attention.k_norm.weight, file[f"{prefix}.k_norm.weight"].to(dtype))
    assert {p.dtype for p in model.parameters()} == {dtype}


def test_tied_weights_share_storage(checkpoints: Checkpoints, tmp_path: Path) -> None:
    path = checkpoints(tied=True)
    model = loaded(path)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    untied = loaded(checkpoints())
    assert untied.lm_head.weight.data_ptr() != untied.model.embed_tokens.weight.data_ptr()


# -- how much is read -----------------------------------------------------------------------------


def test_a_rank_reads_its_part_once(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What four ranks read together is the checkpoint once, but for what each must hold whole."""
    path = checkpoints(num_kv_heads=4, attention_bias=True)
    read: Counter[str] = Counter()
    original = FileTensor.__getitem__

    def counting(self: FileTensor, index: Any) -> torch.Tensor:
        part = original(self, index)
        read[self.name] += part.numel()
        return part

    monkeypatch.setattr(FileTensor, "__getitem__", counting)
    sizes = {name: tensor.numel() for name, tensor in load_file(path / "model.safetensors").items()}
    for tp in (1, 2, 4):
        read.clear()
        for rank in range(tp):
            load_weights(nan_model(path, LoneRank(rank, tp)), path)
        replicated = ("norm.weight", "o_proj.bias")
        expected = {n: size * (tp if n.endswith(replicated) else 1) for n, size in sizes.items()}
        assert read == expected


class Reading:
    """What is being read at each moment: the most tensors, and the most bytes of whole tensors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tensors = self.bytes = 0
        self._now: dict[str, int] = {}
        self._lock = threading.Lock()
        self._original = FileTensor.__getitem__
        self.meanwhile: Callable[[], object] = lambda: None
        monkeypatch.setattr(FileTensor, "__getitem__", lambda source, i: self._read(source, i))

    def _read(self, source: FileTensor, index: Any) -> torch.Tensor:
        with self._lock:
            self._now[source.name] = source.bytes
            self.tensors = max(self.tensors, len(self._now))
            self.bytes = max(self.bytes, sum(self._now.values()))
        self.meanwhile()
        part = self._original(source, index).clone()
        with self._lock:
            del self._now[source.name]
        return part


def test_tensors_are_read_in_parallel(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """36 tensors in rounds of four: each reader waits for three others before it goes on."""
    path = checkpoints(max_shard_size="20KB")
    reading = Reading(monkeypatch)
    barrier = threading.Barrier(weights.READERS, timeout=60)
    reading.meanwhile = barrier.wait
    model = nan_model(path, SoloCommunicator())
    assert len(checkpoint_tensors(model)) % weights.READERS == 0
    load_weights(model, path)
    assert reading.tensors == weights.READERS
    reading.meanwhile = lambda: None
    for one, other in zip(model.parameters(), loaded(path).parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("limit", [5000, 20_000])
def test_bytes_read_at_once_are_bounded(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    """The two largest tensors have 97 * 24 * 4 = 9312 bytes: above 5000 they are read alone."""
    monkeypatch.setattr(weights, "READ_BYTES", limit)
    reading = Reading(monkeypatch)
    reading.meanwhile = lambda: time.sleep(0.002)  # so that readers would overlap if they could
    model = loaded(checkpoints())
    assert not any(parameter.isnan().any() for parameter in model.parameters())
    assert 9312 <= reading.bytes <= max(limit, 9312)


# -- dummy weights --------------------------------------------------------------------------------


def test_dummy_needs_a_config_only_and_is_seeded(checkpoints: Checkpoints, tmp_path: Path) -> None:
    shutil.copy(checkpoints(attention_bias=True) / "config.json", tmp_path)

    def values(seed: int) -> dict[str, torch.Tensor]:
        model = loaded(tmp_path, load_format="dummy", seed=seed)
        return {name: p.clone() for name, p in model.named_parameters()}

    first, again, other = values(0), values(0), values(1)
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name])
        assert not torch.equal(tensor, other[name])
        mean = 1.0 if "norm" in name else 0.0
        assert abs(tensor.mean() - mean) < 0.02
        if tensor.numel() > 500:
            assert abs(tensor.std() - 0.02) < 0.002
    layers = [first[f"model.layers.{i}.mlp.down_proj.weight"] for i in range(3)]
    assert not torch.equal(layers[0], layers[1])


@pytest.mark.parametrize("tp", [2, 4])
def test_dummy_is_the_same_model_at_every_tp(checkpoints: Checkpoints, tp: int) -> None:
    """Each rank's shard is cut from the tensors that one rank alone makes."""
    path = checkpoints(attention_bias=True, num_kv_heads=1)
    alone = checkpoint_tensors(loaded(path, load_format="dummy", seed=5))
    cpu = torch.device("cpu")
    whole = {n: weights.dummy_tensor(n, t.shape, 5, cpu) for n, t in alone.items()}

    for rank in range(tp):
        dummy, filled = (nan_model(path, LoneRank(rank, tp)) for _ in range(2))
        load_weights(dummy, path, load_format="dummy", seed=5)
        for name, tensor in checkpoint_tensors(filled).items():
            assert tensor.shape == tuple(whole[name].shape)
            tensor.fill(whole[name])
        for (name, a), b in zip(dummy.named_parameters(), filled.parameters(), strict=True):
            assert torch.equal(a, b), name
