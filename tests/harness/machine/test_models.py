from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.shape import ModelShape
from harness.machine import models
from harness.machine.models import ModelError, resolve_model

SIZES = {  # metrics.md's table: layers, hidden, query heads, KV heads, intermediate, tied
    "qwen3-0.6b": (28, 1024, 16, 8, 3072, True),
    "qwen3-1.7b": (28, 2048, 16, 8, 6144, True),
    "qwen3-4b": (36, 2560, 32, 8, 9728, True),
    "qwen3-8b": (36, 4096, 32, 8, 12288, False),
    "qwen3-14b": (40, 5120, 40, 8, 17408, False),
    "qwen3-32b": (64, 5120, 64, 8, 25600, False),
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def use_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANGEFINDER_CACHE", str(cache))


def model(name: str = "tiny", path: object = None, load_format: str = "auto") -> dict[str, Any]:
    return {"name": name, "path": None if path is None else str(path), "load_format": load_format}


@pytest.mark.parametrize("name", SIZES)
def test_published_shapes(name: str) -> None:
    folder = resolve_model(model(name, load_format="dummy"))
    shape = ModelShape.from_hf(folder)
    assert SIZES[name] == (
        shape.num_layers, shape.hidden_size, shape.num_heads, shape.num_kv_heads,
        shape.intermediate_size, shape.tied,
    )  # fmt: skip
    assert (shape.head_dim, shape.vocab_size, shape.rope_theta) == (128, 151_936, 1e6)
    assert (shape.rms_norm_eps, shape.qkv_bias, shape.dtype) == (1e-6, False, "bfloat16")
    assert [p.name for p in folder.iterdir()] == ["config.json"]
    assert resolve_model(model(name, load_format="dummy")) == folder


def test_transformers_reads_a_published_config_alike() -> None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(resolve_model(model("qwen3-8b", load_format="dummy")))
    assert (config.model_type, config.num_hidden_layers, config.head_dim) == ("qwen3", 36, 128)
    assert config.tie_word_embeddings is False


def test_the_tiny_model_is_a_whole_checkpoint() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = resolve_model(model())
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert type(loaded).__name__ == "Qwen3ForCausalLM"
    assert loaded.dtype == torch.float32
    assert [p.name for p in folder.glob("*.safetensors")] == ["model.safetensors"]
    shape = ModelShape.from_hf(folder)
    assert shape.legal_tp() == [1, 2, 4, 8] and shape.tied and shape.max_position >= 2048
    assert shape.eos_token_ids == (258,)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.eos_token_id == 258


@pytest.mark.parametrize("text", ["hello", "héllo wörld \n\t", "模型 🚀", "<|im_end|>", ""])
def test_any_text_comes_back_from_its_bytes(text: str) -> None:
    tokenizer = models.byte_tokenizer()
    ids = tokenizer.encode(text).ids
    wanted = [258] if text == "<|im_end|>" else list(text.encode())
    assert ids == wanted
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_the_tiny_model_is_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = resolve_model(model())
    before = {p.name: p.stat().st_mtime_ns for p in folder.iterdir()}
    monkeypatch.setattr(models, "_write_tiny", lambda _: pytest.fail("built twice"))
    assert resolve_model(model()) == folder
    assert {p.name: p.stat().st_mtime_ns for p in folder.iterdir()} == before


def test_the_tiny_weights_follow_from_the_recipe(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    torch.manual_seed(1)
    models._write_tiny(tmp_path)
    assert torch.initial_seed() == 1  # the caller's generator is left alone
    built = load_file(resolve_model(model()) / "model.safetensors")
    again = load_file(tmp_path / "model.safetensors")
    assert built.keys() == again.keys() and all(torch.equal(built[k], again[k]) for k in built)


def test_two_builders_at_once_leave_one_whole_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANGEFINDER_CACHE", str(tmp_path))
    both_write = threading.Barrier(2, timeout=30)

    def write(folder: Path) -> None:
        (folder / "config.json").write_text("whole")
        both_write.wait()

    with ThreadPoolExecutor(2) as pool:
        builds = [pool.submit(models.built, "x", "recipe", write) for _ in range(2)]
        folders = {build.result() for build in builds}
    assert list((tmp_path / "models").iterdir()) == list(folders)
    assert (folders.pop() / "config.json").read_text() == "whole"


def test_a_build_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANGEFINDER_CACHE", str(tmp_path))

    def fail(folder: Path) -> None:
        (folder / "half").write_text("")
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        models.built("x", "recipe", fail)
    assert list((tmp_path / "models").iterdir()) == []


def test_a_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(models.PUBLISHED["qwen3-0.6b"]))
    assert resolve_model(model(path=tmp_path, load_format="dummy")) == tmp_path
    with pytest.raises(ModelError, match=r"no \*.safetensors \(other formats are not read\)"):
        resolve_model(model(path=tmp_path))
    (tmp_path / "pytorch_model.bin").write_text("")
    with pytest.raises(ModelError, match=r"no \*.safetensors"):
        resolve_model(model(path=tmp_path))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (model("qwen3-7b"), r"model='qwen3-7b': choose tiny, qwen3-0.6b"),
        (model("qwen3-0.6b"), r"no weights here; set model.load_format=dummy.*Qwen/Qwen3-0.6B"),
        (model(path="./nowhere/at/all"), r"neither a directory nor a hub id"),
    ],
)
def test_what_cannot_be_found_says_what_to_give(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        resolve_model(section)


def test_a_hub_id_fetches_no_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import fnmatch

    import huggingface_hub

    asked: list[list[str]] = []

    def download(hub_id: str, allow_patterns: list[str]) -> str:
        assert hub_id == "Qwen/Qwen3-0.6B"
        asked.append(allow_patterns)
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "model.safetensors").write_text("")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model(model(path="Qwen/Qwen3-0.6B")) == tmp_path
    files = ["model.py", "pytorch_model.bin", "model-00001-of-00002.safetensors", "tokenizer.json",
             "model.safetensors.index.json", "config.json", "x.pkl"]  # fmt: skip
    fetched = [f for f in files if any(fnmatch.fnmatch(f, p) for p in asked[0])]
    assert fetched == ["model-00001-of-00002.safetensors", "tokenizer.json",
                       "model.safetensors.index.json", "config.json"]  # fmt: skip

    def offline(hub_id: str, allow_patterns: list[str]) -> str:
        raise ConnectionError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ModelError, match=r"could not be fetched \(ConnectionError\)"):
        resolve_model(model(path="Qwen/Qwen3-0.6B"))
