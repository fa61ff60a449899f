"""scripts/aa_check.py on made-up runs: what it counts, and when it is content."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest

from harness.repeats import read
from tests.support.made_runs import noisy, write_cell

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "aa_check.py"


@pytest.fixture(scope="module")
def check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("aa_check", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(tmp_path: Path, seed: int, centre: float = 100.0) -> pd.DataFrame:
    folder = tmp_path / f"run-{seed}"
    rates = noisy(5, 6, between=0.004, within=0.01, seed=seed, centre=centre)
    write_cell(folder, rates)
    return read(folder)


@pytest.mark.parametrize(
    ("centres", "content", "said"),
    [
        ([100, 100, 100, 90], True, "0 of 2 A/A comparisons raised an alarm; their cells: 6 SAME"),
        ([100, 100, 100, 100], False, "was not found"),
        ([100, 90, 90, 81], False, "1 of 2 A/A comparisons raised an alarm; their cells: 4 SAME"),
    ],
)
def test_alarms_and_the_planted_delay_are_counted(
    check: ModuleType, tmp_path: Path, centres: list[float], content: bool, said: str
) -> None:
    frames = [run(tmp_path, seed, centre) for seed, centre in enumerate(centres)]
    for frame in frames:
        frame["step_us"] = 50.0  # the delay stands after the step
    text, as_it_must_be = check.judged(frames, 5)
    assert as_it_must_be is content
    assert said in text
    rows = [line for line in text.splitlines() if line.startswith(("| A/A", "| planted"))]
    assert [row.split(" | ")[0][2:] for row in rows] == (
        ["A/A 1"] * 3 + ["A/A 2"] * 3 + ["planted"] * 3
    )


def test_the_planted_backend_is_made_as_a_session_makes_it(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session gives the name of the backend; each step then lasts a tenth longer."""
    from engine.core import EngineCore
    from harness.backends.native import NativeBackend

    def step(self: EngineCore) -> int:
        time.sleep(0.05)
        return 7

    monkeypatch.setattr(EngineCore, "step", step)
    assert type(check.slowed("native")) is NativeBackend
    begin = time.perf_counter()
    assert EngineCore.step(None) == 7  # type: ignore[arg-type,comparison-overlap]
    assert time.perf_counter() - begin >= 0.05 * (1 + check.DELAY)
