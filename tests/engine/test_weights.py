"""Checkpoints: filled exactly or refused, only a shard read; dummies alike at every TP size."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import weights
from engine.comm import Communicator, SoloCommunicator
from engine.errors import CheckpointError
from engine.models import Qwen3ForCausalLM
from engine.shape import ModelShape
from engine.weights import checkpoint_tensors, load_weights
from tests.support.checkpoints import Checkpoints, reference_logits
from tests.support.models import logits_of
from tests.support.threads import run_ranks

IDS = [3, 96, 0, 41, 17]


def nan_model(path: Path, comm: Communicator, dtype: torch.dtype = torch.float32) -> Any:
    model = Qwen3ForCausalLM(ModelShape.from_hf(path), comm, "sdpa", 64, dtype, "cpu")
    for parameter in model.parameters():
        parameter.fill_(float("nan"))
    return model


def loaded(path: Path, **how: Any) -> Any:
    model = nan_model(path, SoloCommunicator())
    load_weights(model, path, **how)
    return model


def altered(path: Path, folder: Path, change: Any) -> Path:
    """A copy of a single-file checkpoint with its dict of tensors changed."""
    copy = folder / "altered"
    shutil.copytree(path, copy)
    tensors = load_file(copy / "model.safetensors")
    change(tensors)
    save_file({k: v.contiguous() for k, v in tensors.items()}, copy / "model.safetensors")
    return copy


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


# -- what is refused ------------------------------------------------------------------------------


def test_missing_and_unknown_tensors_are_listed(checkpoints: Checkpoints, tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.0.mlp.up_proj.weight"]
        del tensors["model.norm.weight"]
        tensors["model.layers.9.mlp.up_proj.weight"] = torch.zeros(2)

    path = altered(checkpoints(), tmp_path, change)
    model = nan_model(path, SoloCommunicator())
    with pytest.raises(CheckpointError) as error:
        load_weights(model, path)
    message = str(error.value)
    assert "2 (model.layers.0.mlp.up_proj.weight, model.norm.weight) missing" in message
    assert "1 (model.layers.9.mlp.up_proj.weight) unknown" in message
    assert all(p.isnan().all() for p in model.parameters()), "nothing is loaded before names match"


def test_config_that_contradicts_the_checkpoint_is_refused(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """Biases that config.json does not announce, and Q/K norms that a Qwen2 does not have."""
    with_bias = altered(checkpoints(attention_bias=True), tmp_path, lambda tensors: None)
    config = json.loads((with_bias / "config.json").read_text())
    (with_bias / "config.json").write_text(json.dumps({**config, "attention_bias": False}))
    with pytest.raises(CheckpointError, match=r"none missing, 12 \(.*k_proj.bias.* unknown"):
        loaded(with_bias)
    (with_bias / "config.json").write_text(
        json.dumps({**config, "model_type": "qwen2", "head_dim": 16})
    )
    with pytest.raises(CheckpointError, match=r"unknown") as error:
        loaded(with_bias)
    assert "k_norm.weight" in str(error.value)


def test_repeated_head_and_rotary_buffers_are_passed_over(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = torch.zeros(97, 24)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)

    path = checkpoints(tied=True)
    model = loaded(altered(path, tmp_path, change))
    assert torch.equal(model.lm_head.weight, loaded(path).lm_head.weight)


def test_untied_checkpoint_needs_its_head(checkpoints: Checkpoints, tmp_path: Path) -> None:
    path = altered(checkpoints(), tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"1 \(lm_head.weight\) missing, none unknown"):
        loaded(path)


def test_wrong_shape_and_dtype_are_refused(checkpoints: Checkpoints, tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.v_proj.weight"
    narrow = altered(
        checkpoints(), tmp_path / "a", lambda tensors: tensors.update({name: torch.zeros(16, 24)})
    )
    with pytest.raises(CheckpointError, match=r"v_proj.weight: .* has \[16, 24\], .* \[32, 24\]"):
        loaded(narrow)
    packed = altered(
        checkpoints(),
        tmp_path / "b",
        lambda tensors: tensors.update({name: torch.zeros(32, 24, dtype=torch.int8)}),
    )
    with pytest.raises(CheckpointError, match="dtype I8"):
        loaded(packed)


def test_files_are_refused_when_absent_or_overlapping(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    path = tmp_path / "copy"
    shutil.copytree(checkpoints(max_shard_size="20KB"), path)
    first, second, *_ = sorted(path.glob("model-*.safetensors"))
    save_file({**load_file(first), **load_file(second)}, second)
    with pytest.raises(CheckpointError, match="in more than one file"):
        loaded(path)
    second.unlink()
    with pytest.raises(CheckpointError, match=second.name):
        loaded(path)
    (path / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match="neither model.safetensors nor"):
        loaded(path)


# -- how much is read -----------------------------------------------------------------------------


def test_a_rank_reads_its_part_of_one_tensor_at_a_time(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What four ranks read together is the checkpoint once, but for what each must hold whole."""
    path = checkpoints(num_kv_heads=4, attention_bias=True)
    read: dict[str, int] = {}
    original = weights._FileTensor.__getitem__

    def counting(self: Any, index: Any) -> torch.Tensor:
        part = original(self, index)
        name = self_names[id(self._slice)]
        read[name] = read.get(name, 0) + part.numel()
        return part

    self_names: dict[int, str] = {}
    init = weights._FileTensor.__init__

    def naming(self: Any, file: Any, name: str) -> None:
        init(self, file, name)
        self_names[id(self._slice)] = name

    monkeypatch.setattr(weights._FileTensor, "__getitem__", counting)
    monkeypatch.setattr(weights._FileTensor, "__init__", naming)
    sizes = {name: tensor.numel() for name, tensor in load_file(path / "model.safetensors").items()}
    for tp in (1, 2, 4):
        read.clear()
        for rank in range(tp):
            load_weights(nan_model(path, _Rank(rank, tp)), path)
        replicated = ("norm.weight", "o_proj.bias")
        expected = {n: size * (tp if n.endswith(replicated) else 1) for n, size in sizes.items()}
        assert read == expected


class _Rank(SoloCommunicator):
    """A rank that never communicates: enough to build and load its shard."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        self.rank, self.world = rank, world


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
        dummy, filled = (nan_model(path, _Rank(rank, tp)) for _ in range(2))
        load_weights(dummy, path, load_format="dummy", seed=5)
        for name, tensor in checkpoint_tensors(filled).items():
            assert tensor.shape == tuple(whole[name].shape)
            tensor.fill(whole[name])
        for (name, a), b in zip(dummy.named_parameters(), filled.parameters(), strict=True):
            assert torch.equal(a, b), name
