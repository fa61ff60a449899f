"""Words of a command line as values: lists of numbers"""

from __future__ import annotations

import argparse


def numbers(text: str) -> list[int]:
    """`4,8` -> [4, 8].

    Raises:
        argparse.ArgumentTypeError: a word that is no whole number above 0.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise argparse.ArgumentTypeError(
            f"{text}: give whole numbers above 0 separated by commas, as in 4,8"
        )
    return [int(word) for word in words]
