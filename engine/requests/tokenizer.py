"""The checkpoint's tokenizer, loaded when a text is first met."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.errors import RequestError

# One of these holds the vocabulary. transformers 5 makes an empty tokenizer of a folder without.
_FILES = ("tokenizer.json", "vocab.json", "tokenizer.model")


class Tokenizer:
    """Texts to token ids and back. Any thread may call.

    Raises (at first use, and again at each later one):
        RequestError: the model's directory has no tokenizer, or one that does not load.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._lock = threading.Lock()  # loading, and settings that transformers keeps in it
        self._hf: Any = None

    @property
    def hf(self) -> Any:
        """transformers' own object."""
        with self._lock:
            if self._hf is None:
                self._hf = self._load()
            return self._hf

    def encode(self, text: str) -> list[int]:
        """Raises a RequestError too for a text that no file could hold."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the prompt's character {error.start}, {text[error.start]!r}, is one half of a "
                "surrogate pair and no character: leave it out, or decode the text with "
                'errors="replace"'
            ) from error
        hf = self.hf
        with self._lock:
            return list(hf.encode(text))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens. Spaces stay as the model wrote them: a clean-up that looks
        at neighbours would change text that a stream has handed out already."""
        hf = self.hf
        with self._lock:
            return str(
                hf.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            )

    def _load(self) -> Any:
        if not any((self._path / name).is_file() for name in _FILES):
            raise RequestError(
                f"{self._path} has no tokenizer ({', '.join(_FILES)}): add one, or give prompts as "
                "token ids and no stop strings"
            )
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self._path)
        except Exception as error:  # whatever a damaged file makes of it: the request fails alone
            raise RequestError(f"the tokenizer in {self._path} does not load: {error}") from error
