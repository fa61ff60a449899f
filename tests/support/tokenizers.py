"""A byte-level tokenizer like Qwen's in small, and checkpoints that have it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from tests.support.checkpoints import Checkpoints

VOCAB = 300  # 3 special tokens, 256 bytes, merges; ids past them have no token
EOS = 2

TEXT = "the cat sat on the mat. the cat sat. an end of a story, öäü ö €€ €5 €6 日本語 日本 🙂🙂 🙃"


@cache
def byte_level() -> Any:
    """A `tokenizers.Tokenizer`. Its merges were learnt without splitting words, so that some of its
    tokens end inside a character and begin inside another, as some of Qwen's do."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - 3,
        special_tokens=["<|pad|>", "<|im_start|>", "<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 2, trainer)
    return tokenizer


@cache
def hf_tokenizer() -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token="<|endoftext|>")


def decode(token_ids: list[int]) -> str:
    """transformers' own text of all tokens at once."""
    return str(hf_tokenizer().decode(token_ids, skip_special_tokens=True))


def text_checkpoint(checkpoints: Checkpoints) -> Path:
    """A tiny checkpoint with this tokenizer. Its weights are random, and so are the bytes it says:
    most are no characters."""
    path = checkpoints(vocab_size=VOCAB)
    if not (path / "tokenizer.json").exists():
        hf_tokenizer().save_pretrained(path)
    return path
