"""Meters for harness.calibration.crew that do what the name of a part says."""

from __future__ import annotations

import os
import signal
import time
from typing import Any


class ToldMeter:
    """Of a part "fine:x" it hands over (rank's device, "x"); others end as their name says."""

    def __init__(self, comm: Any, device: str) -> None:
        self.device = device

    def __call__(self, name: str) -> list[dict[str, Any]]:
        what, _, word = name.partition(":")
        if what == "raise":
            raise ValueError(f"told to fail: {word}")
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "hang":
            time.sleep(600)
        return [{"name": word, "value": float(os.getpid()), "device": self.device}]


class BrokenMeter:
    def __init__(self, comm: Any, device: str) -> None:
        raise RuntimeError("no such device")
