"""Words of a command line as values: numbers, and lists of them"""

from __future__ import annotations

import argparse
import math


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


def count(text: str) -> int:
    """Raises:
    argparse.ArgumentTypeError: no whole number above 0.
    """
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text}: give a whole number above 0")
    return int(text)


def positive(text: str) -> float:
    """Raises:
    argparse.ArgumentTypeError: no finite number above 0.
    """
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: give a number above 0")
    return value
