"""Text token by token: transformers' decode() of everything, in whole characters; stop strings."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.requests.text import Detokenizer, StopText
from tests.support.tokenizers import VOCAB, byte_level, decode, hf_tokenizer

CUT = "\N{REPLACEMENT CHARACTER}"


def tokens_of(text: bytes) -> list[int]:
    """One token a byte."""
    # The byte-level alphabet of GPT-2: printable bytes stand for themselves, the others follow.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable}
    letters |= {byte: chr(256 + n) for n, byte in enumerate(others)}
    return [byte_level().token_to_id(letters[byte]) for byte in text]


def pieces_of(token_ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(decode)
    return [*(detokenizer.push(token) for token in token_ids), detokenizer.rest()]


def test_the_tokenizer_has_tokens_that_end_inside_a_character() -> None:
    alone = [decode([token]) for token in range(3 + 256, VOCAB)]
    assert any(CUT in text and len(text) > 1 for text in alone)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        (b"ab", ["a", "b", ""]),
        ("€".encode(), ["", "", "€", ""]),
        ("a🙂b".encode(), ["a", "", "", "", "🙂", "b", ""]),
        (b"\xe2\x82", ["", "", CUT]),  # the end of the output cuts a character
        (b"\xe2\x82a", ["", "", CUT + "a", ""]),
        (b"\xff\xffa", ["", CUT, CUT + "a", ""]),
        ("\N{REPLACEMENT CHARACTER}a".encode(), ["", "", "", CUT + "a", ""]),  # one that was meant
    ],
)
def test_a_character_comes_when_it_is_whole(text: bytes, pieces: list[str]) -> None:
    assert pieces_of(tokens_of(text)) == pieces


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, VOCAB - 1), max_size=60))
def test_pieces_of_any_tokens_are_the_whole(token_ids: list[int]) -> None:
    """Special tokens, ids without a token and bytes that are no characters included."""
    assert "".join(pieces_of(token_ids)) == decode(token_ids)


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=30), st.data())
def test_no_piece_of_a_text_holds_half_a_character(text: str, data: st.DataObject) -> None:
    """Its bytes cut into tokens at random: every piece is a part of the text itself."""
    text = text.replace(CUT, "")
    encoded = text.encode()
    token_ids = tokens_of(encoded)
    if data.draw(st.booleans()):
        token_ids = hf_tokenizer().encode(text)
    done = ""
    for piece in pieces_of(token_ids):
        done += piece
        assert text.startswith(done)
    assert done == text


@pytest.mark.parametrize(
    "cycle", [b"\x82\xe2", b"\x80", b"\xe2", b"\xff", b"\xf0\x9f\x99", "🙂".encode(), b"a"]
)
@pytest.mark.parametrize("special", [False, True])
def test_a_token_costs_the_same_however_long_the_output(cycle: bytes, special: bool) -> None:
    """The worst: bytes that are never a character, and special tokens between them."""
    lengths: list[int] = []

    def watched(token_ids: list[int]) -> str:
        lengths.append(len(token_ids))
        return decode(token_ids)

    token_ids = tokens_of(cycle * 100)
    if special:
        token_ids = [t for token in token_ids for t in (token, 2, 2)]
    detokenizer = Detokenizer(watched)
    text = "".join(detokenizer.push(token) for token in token_ids) + detokenizer.rest()
    assert text == decode(token_ids)
    assert max(lengths) <= 17
    assert len(lengths) <= 3 * len(token_ids)


# -- stop strings ----------------------------------------------------------------------------------

LETTERS = ["a", "b", "aa", "ab", "ba", "c", "bca", ""]


def spell(token_ids: list[int]) -> str:
    return "".join(LETTERS[token] for token in token_ids)


def stopped(token_ids: list[int], stop: list[str], min_tokens: int) -> tuple[int, str, str | None]:
    """By hand, on whole texts: (tokens until the end, text, what ended it)."""
    for count in range(1, len(token_ids) + 1):
        before, text = len(spell(token_ids[: count - 1])), spell(token_ids[:count])
        new = [
            (start, order)
            for order, word in enumerate(stop)
            for start in range(len(text))
            if text.startswith(word, start) and start + len(word) > before
        ]
        if new and count >= min_tokens:
            start, order = min(new)
            return count, text[:start], stop[order]
    return len(token_ids), spell(token_ids), None


@settings(max_examples=500, deadline=None)
@given(
    st.lists(st.integers(0, len(LETTERS) - 1), max_size=25),
    st.lists(st.text("abc", min_size=1, max_size=5), max_size=3),
    st.integers(0, 8),
)
def test_stop_strings_are_found_across_tokens(
    token_ids: list[int], stop: list[str], min_tokens: int
) -> None:
    count, expected, found = stopped(token_ids, stop, min_tokens)
    watched = StopText(spell, stop)
    handed_out = ""
    for number, token in enumerate(token_ids, start=1):
        handed_out += watched.push(token, may_stop=number >= min_tokens)
        assert expected.startswith(handed_out), "text was handed out that the stop string cuts"
        # Nothing is held back that cannot be the beginning of a stop string.
        held = spell(token_ids[:number])[len(handed_out) :]
        assert watched.found or not held or any(s.startswith(held) for s in stop)
        if watched.found is not None:
            break
    handed_out += watched.finish()
    assert (number if token_ids else 0, handed_out, watched.found) == (count, expected, found)
    assert watched.text == handed_out


@pytest.mark.parametrize(
    ("stop", "text", "found"),
    [
        (["sat", "cat"], "the ", "cat"),  # the one that starts first
        (["cat s", "cat"], "the ", "cat s"),  # of two in one place the one named first
        (["cat", "cat s"], "the ", "cat"),
        (["dog"], "the cat sat", None),
    ],
)
def test_which_stop_string_counts(stop: list[str], text: str, found: str | None) -> None:
    watched = StopText(lambda ids: "".join(["the ", "cat sat"][i] for i in ids), stop)
    watched.push(0)
    watched.push(1)
    watched.finish()
    assert (watched.text, watched.found) == (text, found)


def test_the_work_of_a_token_is_flat_in_the_output() -> None:
    rng = random.Random(0)
    token_ids = [rng.randrange(3, VOCAB) for _ in range(2_000)]
    decoded: list[int] = []

    def watched(ids: list[int]) -> str:
        decoded.append(len(ids))
        return decode(ids)

    text = StopText(watched, ["never in it", "nor this"])
    for token in token_ids:
        text.push(token)
    text.finish()
    assert text.text == decode(token_ids)
    assert sum(decoded) < 30 * len(token_ids)
