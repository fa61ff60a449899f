"""Around a function that a benchmark measures: the device waited for, a slow-down planted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

Measure = Callable[..., Any]
"""tests/benchmarks/conftest.py::measure"""


def planted(given: list[str], name: str) -> float:
    """The factor planted in a benchmark, 1 for none.

    Raises:
        pytest.UsageError: not NAME=FACTOR with a factor of at least 1.
    """
    found = 1.0
    for text in given:
        chosen, _, factor = text.rpartition("=")
        if not chosen or not factor.replace(".", "", 1).isdigit() or float(factor) < 1:
            raise pytest.UsageError(f"--plant {text}: give NAME=FACTOR, a factor of at least 1")
        if chosen in (name, "all"):
            found = float(factor)
    return found


def slowed(function: Callable[..., Any], factor: float, timer: Callable[[], float]) -> Any:
    """The function, and after it the rest of `factor` times its time by `timer`."""

    def slow(*args: Any, **kwargs: Any) -> Any:
        begin = timer()
        result = function(*args, **kwargs)
        until = begin + (timer() - begin) * factor
        while timer() < until:
            pass
        return result

    return slow if factor > 1 else function


def synchronized(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with all that it enqueued on a GPU done when it returns."""

    def whole(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        torch.cuda.synchronize()
        return result

    return whole if torch.cuda.is_available() else function
