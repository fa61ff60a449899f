"""Checkpoints that do not fill the model exactly are refused, by file and tensor."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint import INDEX, scan
from engine.comm import SoloCommunicator
from engine.errors import CheckpointError
from engine.weights import load_weights
from tests.support.checkpoints import Checkpoints
from tests.support.models import loaded, nan_model


def altered(path: Path, folder: Path, change: Any) -> Path:
    """A copy of a single-file checkpoint with its dict of tensors changed."""
    copy = folder / "altered"
    shutil.copytree(path, copy)
    tensors = load_file(copy / "model.safetensors")
    change(tensors)
    save_file({k: v.contiguous() for k, v in tensors.items()}, copy / "model.safetensors")
    return copy


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


@pytest.mark.parametrize("kind", ["bias", "norm"])
def test_tensors_that_an_architecture_always_has_are_missed(
    checkpoints: Checkpoints, tmp_path: Path, kind: str
) -> None:
    """Qwen2 without the biases of q, k, v; Qwen3 without the norms of q and k."""
    qwen2 = {"model_type": "qwen2", "hidden_size": 64}
    ends = {"bias": ("proj.bias",), "norm": ("q_norm.weight", "k_norm.weight")}[kind]

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(ends)]:
            del tensors[name]

    path = altered(checkpoints(**(qwen2 if kind == "bias" else {})), tmp_path, change)
    count = 9 if kind == "bias" else 6
    with pytest.raises(CheckpointError, match=rf"{count} \(.*self_attn.*\) missing, none unknown"):
        loaded(path)


def test_repeated_head_and_rotary_buffers_are_passed_over(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)

    path = checkpoints(tied=True)
    model = loaded(altered(path, tmp_path, change))
    assert torch.equal(model.lm_head.weight, loaded(path).lm_head.weight)


@pytest.mark.parametrize("different", ["value", "shape", "dtype"])
def test_a_head_that_contradicts_tied_weights_is_refused(
    checkpoints: Checkpoints, tmp_path: Path, different: str
) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        head = tensors["model.embed_tokens.weight"].clone()
        head[-1, -1] += different == "value"
        head = head[:-1] if different == "shape" else head
        tensors["lm_head.weight"] = head.half() if different == "dtype" else head

    path = altered(checkpoints(tied=True), tmp_path, change)
    named = r"model.safetensors: lm_head.weight is not model.embed_tokens.weight, .* ties the two"
    with pytest.raises(CheckpointError, match=named):
        loaded(path)


def test_tied_tables_of_a_foreign_dtype_are_refused(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        table = torch.zeros_like(tensors["model.embed_tokens.weight"], dtype=torch.int8)
        tensors |= {"model.embed_tokens.weight": table, "lm_head.weight": table.clone()}

    path = altered(checkpoints(tied=True), tmp_path, change)
    with pytest.raises(CheckpointError, match="embed_tokens.weight: dtype I8 is not one of"):
        loaded(path)


def test_untied_checkpoint_needs_its_head(checkpoints: Checkpoints, tmp_path: Path) -> None:
    path = altered(checkpoints(), tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"1 \(lm_head.weight\) missing, none unknown"):
        loaded(path)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (torch.zeros(16, 24), r"has \[16, 24\], config.json asks for \[32, 24\]"),
        (torch.zeros(32), r"has \[32\], config.json asks for \[32, 24\]"),
        (torch.tensor(1.0), r"has \[\], config.json asks for \[32, 24\]"),
        (torch.zeros(32, 24, dtype=torch.int8), r"dtype I8 is not one of F64, F32, F16, BF16"),
    ],
)
def test_wrong_shape_and_dtype_are_refused(
    checkpoints: Checkpoints, tmp_path: Path, value: torch.Tensor, named: str
) -> None:
    """By file and tensor, before anything is loaded."""
    name = "model.layers.2.self_attn.v_proj.weight"
    path = altered(checkpoints(), tmp_path, lambda tensors: tensors.update({name: value}))
    model = nan_model(path, SoloCommunicator())
    with pytest.raises(CheckpointError, match=f"model.safetensors: {name}: .*{named}"):
        load_weights(model, path)
    assert all(p.isnan().all() for p in model.parameters())


@pytest.mark.parametrize("kept", [0, 7, 500, 60_000, -4])
def test_a_file_that_was_cut_off_is_named(
    checkpoints: Checkpoints, tmp_path: Path, kept: int
) -> None:
    """Inside the length of the header, the header, the first and the last tensor."""
    path = altered(checkpoints(), tmp_path, lambda tensors: None)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match="model.safetensors: not a whole safetensors file"):
        loaded(path)


def test_a_file_that_is_lost_while_it_is_read_is_named_with_its_tensor(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    path = altered(checkpoints(), tmp_path, lambda tensors: None)
    source = scan(path)["model.norm.weight"]
    (path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="model.safetensors: cannot read model.norm.weight"):
        source[:]


def several_files(checkpoints: Checkpoints, tmp_path: Path) -> tuple[Path, list[Path], Any]:
    """-> a copy of a checkpoint in several files, the files, and the parsed index."""
    path = tmp_path / "copy"
    shutil.copytree(checkpoints(max_shard_size="20KB"), path)
    index = json.loads((path / INDEX).read_text())
    return path, sorted(path.glob("model-*.safetensors")), index


def test_a_tensor_in_two_files_is_refused(checkpoints: Checkpoints, tmp_path: Path) -> None:
    path, (first, second, *_), _ = several_files(checkpoints, tmp_path)
    save_file({**load_file(first), **load_file(second)}, second)
    named = rf"model\.\S+ is in more than one file, {first.name} and {second.name}"
    with pytest.raises(CheckpointError, match=named):
        loaded(path)


def test_an_index_that_names_what_is_not_there_is_refused(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    path, (first, second, *_), index = several_files(checkpoints, tmp_path)
    name = next(n for n, file in index["weight_map"].items() if file == second.name)
    moved = {**index, "weight_map": {**index["weight_map"], name: first.name}}
    (path / INDEX).write_text(json.dumps(moved))
    with pytest.raises(CheckpointError, match=f"{INDEX}: {name} is not in {first.name}"):
        loaded(path)
    (path / INDEX).write_text(json.dumps(index))
    second.unlink()
    with pytest.raises(CheckpointError, match=rf"not there: \['{second.name}'\], for .*{name}"):
        loaded(path)
    (path / INDEX).unlink()
    with pytest.raises(CheckpointError, match="neither model.safetensors nor"):
        loaded(path)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"weight_map": ["a"]}', '{"weight_map": {"a": 5}}', "\udcff"]
)
def test_an_unreadable_index_is_refused(
    checkpoints: Checkpoints, tmp_path: Path, text: str
) -> None:
    path, _, _ = several_files(checkpoints, tmp_path)
    (path / INDEX).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(CheckpointError, match=f"{INDEX}: not an index of safetensors files"):
        loaded(path)
