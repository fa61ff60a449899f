"""Text of a request token by token: whole characters, and its first stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

_CUT = "\N{REPLACEMENT CHARACTER}"  # what decoding makes of bytes that are no character (yet)
_WINDOW, _KEPT = 16, 8  # tokens that are decoded at once at most, and how many of them stay


class Detokenizer:
    """Pieces of text as tokens come. None ends in half a character, and together with `rest` they
    are `decode` of all tokens.

    Only the last tokens are decoded again, so a token's cost does not grow with the output. In a
    byte-level vocabulary (every Qwen) a token is some bytes, and decoding writes one U+FFFD for
    bytes that begin a character and do not end it, so at most the last character of a text can
    still change. Where a window begins inside a character only its first 3 bytes can read
    differently, since any byte that starts a character begins anew; its 8 tokens have at least 8.

    Args:
        decode: token ids to text; tokens without text (special ones) decode to nothing.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._text = ""  # of the window
        self._sent = 0  # how many of its characters were handed out

    def push(self, token: int) -> str:
        """The text that is certain now and was not before; may be empty."""
        window = [*self._window, token]
        text = self._decode(window)
        if text == self._text and not self._decode([token]):
            return ""  # no bytes: it would only fill the window
        piece = text[self._sent : _certain(text)]
        if len(window) > _WINDOW:
            window = window[-_KEPT:]
            text = self._decode(window)
        self._window, self._text, self._sent = window, text, _certain(text)
        return piece

    def rest(self) -> str:
        """What is left when no token follows."""
        return self._text[self._sent :]


class StopText:
    """The text of a request up to the first of its stop strings.

    Text that may be the beginning of a stop string is held back until it is known.

    Attributes:
        found: the stop string that ended the text: of those in it the one that starts first, of
            those that start together the one named first.
        parts: pieces handed out so far.
    """

    def __init__(self, decode: Decode, stop: Sequence[str] = ()) -> None:
        self._pieces = Detokenizer(decode)
        self._stop = stop
        self._longest = max(map(len, stop), default=0)
        self._held = ""
        self.found: str | None = None
        self.parts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self.parts)

    def push(self, token: int, may_stop: bool = True) -> str:
        """The text that is certain now and was not before.

        Args:
            may_stop: whether a stop string that this token completes ends the text; one that was
                completed before counts no more.
        """
        piece = self._pieces.push(token)
        if not piece:
            return ""
        text, before = self._held + piece, len(self._held)
        if may_stop:
            # One that ends in the text before was not to stop it then, and does not now.
            starts = [text.find(stop, max(0, before + 1 - len(stop))) for stop in self._stop]
            start, n = min(((at, n) for n, at in enumerate(starts) if at >= 0), default=(0, None))
            if n is not None:
                self.found = self._stop[n]
                return self._hand_out(text[:start], held="")
        held = self._beginning(text)
        return self._hand_out(text[: len(text) - held], held=text[len(text) - held :])

    def finish(self) -> str:
        """The last piece, when no token follows."""
        return "" if self.found is not None else self._hand_out(self._held + self._pieces.rest())

    def _beginning(self, text: str) -> int:
        """How many characters at the end of `text` begin a stop string and do not complete it."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            end = text[-length:]
            if any(len(stop) > length and stop.startswith(end) for stop in self._stop):
                return length
        return 0

    def _hand_out(self, piece: str, held: str = "") -> str:
        self._held = held
        self.parts.append(piece)
        return piece


def _certain(text: str) -> int:
    """Characters of a text that no further token can change."""
    return len(text) - text.endswith(_CUT)
