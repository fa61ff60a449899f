"""Times of clean steps, to which shares, utilisation and the cost of instruments relate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from harness.measuring.attribution import Joined
    from harness.measuring.window import Window


@dataclass(frozen=True, slots=True)
class StepTimes:
    """S steps on R ranks.

    Attributes:
        phase: [S] codes; us: [S, R] forward and sampling.
        source, pass_name: whose clock, in which pass.
    """

    phase: np.ndarray
    us: np.ndarray
    source: str
    pass_name: str

    def of(self, phase: int | None) -> np.ndarray:
        """[s, R] of one phase, or all."""
        return self.us if phase is None else self.us[self.phase == phase]

    @classmethod
    def of_windows(cls, windows: Sequence[Window]) -> StepTimes:
        """The ranks' own clocks in windows of one pass; true where a forward is synchronous
        (CPU)."""
        return cls(
            np.concatenate([w.steps[0]["phase"] for w in windows]),
            np.concatenate([w.step_us() for w in windows]),
            "host",
            windows[0].pass_name,
        )

    @classmethod
    def of_joined(cls, joined: Joined, pass_name: str) -> StepTimes:
        """Device times of a pass whose steps were timed."""
        return cls(joined.steps["phase"], joined.step_us, joined.source, pass_name)
