"""scripts/gate_check.py and scripts/host_work.py on figures made by hand: what they count."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from harness.judging.gate import Line
from harness.judging.verdict import Judgement, Verdict

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import gate_check

    return gate_check


def lines(**ratios: tuple[str, float]) -> list[Line]:
    return [
        Line(f"file.py::{name}", "", Judgement(Verdict(verdict), "", ratio))
        for name, (verdict, ratio) in ratios.items()
    ]


def test_alarms_and_planted_slow_downs_are_counted(check: ModuleType) -> None:
    run = check.Run
    runs = [
        run(lines(a=("SAME", 1.01), b=("AMBIGUOUS", 0.9)), seconds=60.0),
        run(lines(a=("SLOWER", 1.2), b=("SAME", 1.0)), seconds=90.0),
        run(lines(a=("SLOWER", 1.31), b=("SAME", 1.02)), frozenset({"file.py::a"}), 90.0),
        run(lines(a=("SLOWER", 1.22), b=("SAME", 1.2)), frozenset({"file.py::b"}), 120.0),
    ]
    assert list(map(check.wrong, runs)) == [[], ["a SLOWER"], [], ["a SLOWER", "b SAME"]]
    said, _, table = check.report(runs, 1.3).partition("\n\n")
    assert said == (
        "1 of 2 judgements of unchanged code raised an alarm. A slow-down by 1.3 was found in 1 of "
        "2 benchmarks that had one; 2 others were called slower. 90 s a judgement."
    )
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()[2:]]
    assert rows == [
        ["a", "1 SAME, 2 SLOWER", "1.010 to 1.220", "SLOWER", "1.310"],
        ["b", "1 AMBIGUOUS, 2 SAME", "0.900 to 1.020", "SAME", "1.200"],
    ]


def test_the_hosts_time_is_given_a_sequence_and_by_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import host_work

    found = {(1, 128): 50.0, (1, 4096): 60.0, (1024, 128): 4096.0, (1024, 4096): 2048.0}
    rows = host_work.table(found).splitlines()
    assert rows[0].startswith("| batch | context 128, us a step | context 4,096, us a step |")
    assert rows[2:] == ["| 1 | 50 | 60 | 60.0 | 1.20 |", "| 1,024 | 4,096 | 2,048 | 4.0 | 0.50 |"]
