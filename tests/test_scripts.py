"""scripts/aa_check.py on made-up runs: what it counts, and when it is content."""

from __future__ import annotations

import importlib.util
import time
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest

from harness.judging.cells import compare
from harness.judging.repeats import read
from tests.support.made_runs import noisy, write_cell

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "aa_check.py"


@pytest.fixture(scope="module")
def check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("aa_check", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(tmp_path: Path, seed: int, centre: float = 100.0, spread: float = 0.004) -> pd.DataFrame:
    folder = tmp_path / f"run-{seed}"
    rates = noisy(5, 6, between=spread, within=0.01, seed=seed, centre=centre)
    write_cell(folder, rates)
    return read(folder)


@pytest.mark.parametrize(
    ("centres", "content", "said"),
    [
        ([100, 100, 100, 90], True, "0 of 2 A/A comparisons raised an alarm; their cells: 6 SAME"),
        (
            [100, 100, 100, 90],
            True,
            "was found in 1 of 1 comparisons whose floor was at most 7%, of 1",
        ),
        ([100, 100, 100, 100], False, "was found in 0 of 1 comparisons"),
        ([100, 90, 90, 81], False, "1 of 2 A/A comparisons raised an alarm; their cells: 4 SAME"),
    ],
)
def test_alarms_and_the_planted_delay_are_counted(
    check: ModuleType, tmp_path: Path, centres: list[float], content: bool, said: str
) -> None:
    frames = [run(tmp_path, seed, centre) for seed, centre in enumerate(centres)]
    for frame in frames:
        frame["step_us"] = 50.0  # the delay stands after the step
    *alike, planted = [compare(a, b) for a, b in pairwise(frames)]
    text, as_it_must_be = check.judged(alike, [planted], 5)
    assert as_it_must_be is content
    assert said in text
    rows = [line for line in text.splitlines() if line.startswith(("| A/A", "| planted"))]
    assert [row.split(" | ")[0][2:] for row in rows] == (
        ["A/A 1"] * 3 + ["A/A 2"] * 3 + ["planted 1"] * 3
    )


@pytest.mark.parametrize(
    ("quiet", "content", "said"),
    [
        (True, True, "was found in 1 of 1 comparisons whose floor was at most 7%, of 2 made"),
        (False, False, "was found in 0 of 0 comparisons whose floor was at most 7%, of 2 made"),
    ],
)
def test_a_noisy_comparison_proves_nothing(
    check: ModuleType, tmp_path: Path, quiet: bool, content: bool, said: str
) -> None:
    """Engines that differ by a fifth hide a tenth; another try may be quieter."""
    alike = [compare(run(tmp_path, 0), run(tmp_path, 1))]
    noisy_one = compare(run(tmp_path, 2, spread=0.2), run(tmp_path, 3, 90.0, spread=0.2))
    spread = 0.004 if quiet else 0.2
    other = compare(run(tmp_path, 4, spread=spread), run(tmp_path, 5, 90.0, spread=spread))
    assert [check.can_tell(one) for one in (noisy_one, other)] == [False, quiet]
    text, as_it_must_be = check.judged(alike, [noisy_one, other], 5)
    assert as_it_must_be is content
    assert said in text


@pytest.mark.parametrize(("spread", "told"), [(0.004, "1 of 1"), (0.2, "0 of 0")])
def test_no_comparison_shows_nothing(
    spread: float,
    told: str,
    check: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The time is up behind the first pair, which no further one follows then."""
    made: list[str] = []

    def measured(arguments: list[str], results: Path, functions: object) -> Path:
        made.append(str(functions))
        folder = results / f"run-{len(made)}"
        centre = 90.0 if "slowed" in made[-1] else 100.0
        steady = {"between": spread, "within": 0.01, "centre": centre}
        write_cell(folder, noisy(5, 6, seed=len(made), **steady))
        return folder

    monkeypatch.setattr(check, "measured", measured)
    assert check.main(["--minutes=1e-9", "--tries=3", f"--keep={tmp_path}"]) == 1
    out = capsys.readouterr().out
    assert "0 of 0 A/A comparisons raised an alarm" in out and f"was found in {told}" in out
    assert len(made) == 2
    for word, why in (
        ("--runs=1", "--runs 1: an A/A comparison needs 2"),
        ("--runs=0", "--runs: 0: give a whole number above 0"),
        ("--minutes=nan", "--minutes: nan: give a number above 0"),
    ):
        with pytest.raises(SystemExit) as ended:
            check.main([word])
        assert ended.value.code == 2 and why in capsys.readouterr().err


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
