"""Where a model comes from: a published shape, the small one built here, a path, a hub id."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from harness.machine.cache import cache_root, writing
from harness.machine.fingerprint import digest

_COMMON = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 40960,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def _published(layers: int, hidden: int, heads: int, inter: int, tied: bool) -> dict[str, Any]:
    return _COMMON | {
        "num_hidden_layers": layers,
        "max_window_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": inter,
        "tie_word_embeddings": tied,
    }


# config.json of Qwen/Qwen3-*: layers, hidden size, query heads, intermediate size, tied.
PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _published(28, 1024, 16, 3072, True),
    "qwen3-1.7b": _published(28, 2048, 16, 6144, True),
    "qwen3-4b": _published(36, 2560, 32, 9728, True),
    "qwen3-8b": _published(36, 4096, 32, 12288, False),
    "qwen3-14b": _published(40, 5120, 40, 17408, False),
    "qwen3-32b": _published(64, 5120, 64, 25600, False),
}

# Small enough for seconds a point on two cores, large enough that TP 1, 2, 4 and 8 are legal.
TINY: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "intermediate_size": 384,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "bos_token_id": 256,
    "eos_token_id": 258,
}
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 256, 257, 258
_TINY_VERSION = 1  # raise it when the recipe changes, so that no old copy is used

_HUB_FILES = ("*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json",
              "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt",
              "special_tokens_map.json", "added_tokens.json", "chat_template*")  # fmt: skip


class ModelError(ConfigError):
    """A model that cannot be found or used; the text says what to give instead."""


def resolve_model(model: dict[str, Any]) -> Path:
    """The local directory of a resolved `model` section (name, path, load_format).

    A path that is a directory is taken as it is, any other path is a hub id, of which
    configuration, tokenizer and safetensors are fetched (never code). Without a path `tiny` is
    built, and a published size is a directory with config.json alone, enough for dummy weights.

    Raises:
        ModelError: an unknown name, a directory without what is needed, a hub id that cannot be
            fetched, a published size without weights.
        CacheError: the model is built here, and the cache cannot be written.
    """
    name, path, load_format = model["name"], model["path"], model["load_format"]
    if path is not None:
        local = Path(path).expanduser()
        folder = local if local.is_dir() else _from_hub(str(path), load_format)
        _check(folder, load_format)
        return folder
    if name == "tiny":
        return build_tiny()
    if name not in PUBLISHED:
        raise ModelError(f"model={name!r}: choose tiny, {', '.join(PUBLISHED)}, or set model.path")
    if load_format != "dummy":
        raise ModelError(
            f"model={name}: no weights here; set model.load_format=dummy, or model.path to a "
            f"directory or hub id (Qwen/{name.replace('qwen', 'Qwen').replace('b', 'B')})"
        )
    text = json.dumps(PUBLISHED[name], indent=2, sort_keys=True)
    return built(name, text, lambda folder: (folder / "config.json").write_text(text + "\n"))


def build_tiny() -> Path:
    """The directory of a small Qwen3 in Hugging Face format, built once and then reused:
    transformers' own model with seeded weights (float32, safetensors) and a byte-level tokenizer.
    Each major version of transformers has its own copy, since it names the tokenizer's class."""
    major = metadata.version("transformers").split(".")[0]
    recipe = json.dumps([_TINY_VERSION, major, TINY, SPECIAL_TOKENS], sort_keys=True)
    return built("tiny", recipe, _write_tiny)


def _write_tiny(folder: Path) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    config = Qwen3Config(**TINY)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config).to(torch.float32)
    progress_bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    model.save_pretrained(folder)
    if progress_bar:
        logging.enable_progress_bar()
    save_byte_tokenizer(folder)


def save_byte_tokenizer(folder: Path) -> None:
    """`byte_tokenizer` in transformers' format."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer(),
        eos_token=SPECIAL_TOKENS[2],
        pad_token=SPECIAL_TOKENS[0],
        model_max_length=TINY["max_position_embeddings"],
    )
    tokenizer.save_pretrained(folder)


def byte_tokenizer() -> Any:
    """A `tokenizers.Tokenizer` of the 256 bytes and the special tokens, without merges: a byte's id
    is its value, and any text comes back unchanged. The model's further ids stand for no text, as
    the last ids of the published models do."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    # ByteLevel writes a printable byte as its Latin-1 character, the others as U+0100, U+0101, ...
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    chars = {byte: chr(byte) for byte in printable}
    chars |= {byte: chr(0x100 + place) for place, byte in enumerate(others)}
    vocab = {chars[byte]: byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL_TOKENS])
    return tokenizer


def built(name: str, recipe: str, write: Callable[[Path], Any]) -> Path:
    """`<cache>/models/<name>-<hash of recipe>`, written beside it and renamed when whole, so that a
    reader never sees half of it and two builders cannot disturb each other.

    Raises:
        CacheError: the cache cannot be written.
    """
    target = cache_root() / "models" / f"{name}-{digest(recipe, 8)}"
    with writing(target.parent):
        if not target.is_dir():
            _build(target, write)
    return target


def _build(target: Path, write: Callable[[Path], Any]) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        write(partial)
        partial.chmod(0o755)
        try:
            partial.rename(target)
        except OSError:
            if not target.is_dir():  # anything but: another process built it first
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def random_weights(model: dict[str, Any]) -> bool:
    """Whether a resolved `model` section has weights that nobody trained, for all that can be told:
    dummy ones, and what was built here, by name or by its folder."""
    if model["load_format"] == "dummy":
        return True
    if model["path"] is None:
        return bool(model["name"] == "tiny")
    folder = Path(model["path"]).expanduser().resolve()
    made = folder.name.startswith("tiny-") or "-dummy-" in folder.name
    return made and folder.parent == (cache_root() / "models").resolve()


def _from_hub(hub_id: str, load_format: str) -> Path:
    parts = hub_id.split("/")
    if len(parts) != 2 or not all(parts) or parts[0] in (".", "..", "~"):
        raise ModelError(f"model.path={hub_id}: neither a directory nor a hub id (owner/name)")
    from huggingface_hub import snapshot_download

    patterns = [f for f in _HUB_FILES if load_format != "dummy" or "safetensors" not in f]
    try:
        return Path(snapshot_download(hub_id, allow_patterns=patterns))
    except Exception as error:  # offline, unknown, gated: the library has a class for each
        raise ModelError(
            f"model.path={hub_id}: could not be fetched ({type(error).__name__}); give a local "
            "directory"
        ) from error


def _check(folder: Path, load_format: str) -> None:
    if not (folder / "config.json").is_file():
        raise ModelError(f"model.path={folder}: no config.json; give a Hugging Face directory")
    if load_format != "dummy" and not any(folder.glob("*.safetensors")):
        raise ModelError(
            f"model.path={folder}: no *.safetensors (other formats are not read); convert it, or "
            "set model.load_format=dummy"
        )


def with_weights(model: dict[str, Any]) -> Path:
    """As `resolve_model`, for an engine that loads files alone: dummy weights are a checkpoint of
    the config's shape and dtype, written once (0.6B: 1.2 GB) with a byte-level tokenizer."""
    folder = resolve_model(model)
    if model["load_format"] != "dummy":
        return folder
    text = (folder / "config.json").read_text(encoding="utf-8")
    return built(f"{model['name']}-dummy", text, lambda target: _write_dummy(folder, target))


def _write_dummy(folder: Path, target: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from engine.shape import ModelShape

    dtype = getattr(torch, ModelShape.from_hf(folder).dtype)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype)
    made.save_pretrained(target)
    save_byte_tokenizer(target)
    shutil.copyfile(folder / "config.json", target / "config.json")
