"""The gate's judgement of pytest-benchmark reports that were made by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from harness.judging.gate import (
    GateError,
    Sample,
    Side,
    judge_pairs,
    judged,
    kept,
    machine_key,
    read_baseline,
    table,
    write_baseline,
)
from harness.judging.verdict import Verdict

NAME = "tests/benchmarks/test_a.py::test_step"
Rounds = Sequence[Sequence[float]]


def side(found: Mapping[str, Rounds], workload: str = "w") -> Side:
    """One report a process: name -> rounds of each process."""
    whole = Side()
    for process in range(max(map(len, found.values()), default=0)):
        whole.add(report({name: rounds[process] for name, rounds in found.items()}, workload))
    return whole


def report(found: Mapping[str, Sequence[float]], workload: str = "w") -> dict[str, Any]:
    return {
        "benchmarks": [
            {"fullname": name, "extra_info": {"workload": workload}, "stats": {"data": list(data)}}
            for name, data in found.items()
        ]
    }


def noisy(factor: float, seed: int, processes: int = 5) -> tuple[Rounds, Rounds]:
    """Rounds of both sides in pairs. The machine slows both down alike, by up to 3 times and for a
    while each time; a process is 2 % off and a round 8 %; one round in ten takes twice as long."""
    rng = np.random.default_rng(seed)
    sides = []
    drift = np.exp(np.repeat(rng.uniform(0, math.log(3), (processes, 4)), 5, axis=1))
    for scale in (1.0, factor):
        own = np.exp(rng.normal(0, 0.02, (processes, 1)) + rng.normal(0, 0.08, (processes, 20)))
        own *= np.where(rng.random((processes, 20)) < 0.1, 2.0, 1.0)
        sides.append((1e-3 * scale * drift * own).tolist())
    return sides[0], sides[1]


def test_a_slow_down_of_1_3_is_found_and_unchanged_code_is_not_slower() -> None:
    """A hundred of each, in noise that is the machine's and hits neighbouring rounds alike."""
    verdicts: dict[float, list[Verdict | None]] = {1.0: [], 1.3: [], 1 / 1.3: []}
    for factor, found in verdicts.items():
        for seed in range(100):
            base, head = noisy(factor, seed)
            (line,) = judged(side({NAME: base}), side({NAME: head}))
            found.append(line.verdict)
    assert verdicts[1.0].count(Verdict.SLOWER) == verdicts[1.0].count(Verdict.FASTER) == 0
    assert verdicts[1.0].count(Verdict.SAME) >= 99
    assert verdicts[1.3].count(Verdict.SLOWER) >= 99
    assert verdicts[1 / 1.3].count(Verdict.FASTER) >= 99


def test_intervals_are_those_of_a_paired_t_test() -> None:
    base, head = noisy(1.2, seed=7)
    found = judge_pairs(Sample("w", [*map(list, base)]), Sample("w", [*map(list, head)]), 0.15)
    logs = np.median(np.log(np.array(head) / np.array(base)), axis=1)
    lo, hi = stats.ttest_1samp(logs, 0.0).confidence_interval(0.95)
    assert found.ratio == pytest.approx(stats.gmean(np.exp(logs)), rel=1e-12)
    assert (found.ratio_lo, found.ratio_hi) == pytest.approx((math.exp(lo), math.exp(hi)), rel=1e-9)


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ([1.30, 1.31, 1.29, 1.30], Verdict.SLOWER),
        ([1.16, 1.17, 1.16, 1.17], Verdict.SLOWER),
        ([1.13, 1.14, 1.13, 1.14], Verdict.SAME),  # below the floor of 15 %
        ([1.00, 1.01, 0.99, 1.00], Verdict.SAME),
        ([1.00, 1.60, 1.30, 1.30], Verdict.AMBIGUOUS),  # 1.29, but 99 % hold 1
        ([0.70, 0.71, 0.69, 0.70], Verdict.FASTER),
    ],
)
def test_the_floor_and_the_interval_decide(ratios: list[float], verdict: Verdict) -> None:
    base, head = [[1.0] * 3 for _ in ratios], [[r] * 3 for r in ratios]
    (line,) = judged(side({NAME: base}), side({NAME: head}))
    assert line.verdict is verdict
    assert line.slower == (verdict is Verdict.SLOWER)
    assert line.settled == (verdict in (Verdict.SAME, Verdict.FASTER))


def test_without_pairs_the_fastest_rounds_of_each_process_are_judged_as_engines_are() -> None:
    fast = [[1.0 + 0.01 * p, 1.0, 1.01, 1.02, 0.99, 9.0, 9.0, 9.0] for p in range(5)]
    slow = [[1.3 * x for x in rounds] for rounds in fast]
    (line,) = judged(side({NAME: fast}), side({NAME: slow}), paired=False)
    assert line.verdict is Verdict.SLOWER and line.judgement is not None
    assert line.judgement.ratio == pytest.approx(1.3, rel=1e-9)
    assert line.judgement.a is not None
    assert line.judgement.a.value == pytest.approx(1.01, rel=5e-3)  # the third of the five fastest
    (line,) = judged(side({NAME: fast}), side({NAME: fast[::-1]}), paired=False)
    assert line.verdict is Verdict.SAME


def test_what_the_base_lacks_or_measured_otherwise_is_recorded_and_not_judged() -> None:
    rounds = [[1.0, 2.0]] * 4
    base = side({"a::same": rounds, "a::gone": rounds})
    head = side({"a::same": [[2.0, 4.0]] * 4, "a::new": [[3e-6, 4e-6]] * 4})
    lines = {line.bare: line for line in judged(base, head)}
    assert list(lines) == ["same", "new", "gone"]
    assert lines["same"].slower
    assert lines["new"].note == "recorded, not judged: the base has no such benchmark"
    assert lines["gone"].note == "gone: the base alone has it"
    (changed,) = judged(side({NAME: rounds}, "v1"), side({NAME: [[9.0, 9.0]] * 4}, "v2"))
    assert changed.note == "recorded, not judged: the file that defines it was changed"
    (few,) = judged(side({NAME: rounds[:3]}), side({NAME: [[9.0, 9.0]] * 4}))
    assert few.note == "recorded, not judged: 3 processes on a side, 4 are needed"
    assert not any(line.slower for line in (*lines.values(), changed, few) if line.bare != "same")
    rows = table(lines.values(), head).splitlines()[2:]
    assert [row.split(" | ")[1] for row in rows] == ["2,000,000", "3", "-"]
    assert [row.split(" | ")[4] for row in rows] == ["SLOWER", "-", "-"]


def test_a_run_that_measured_nothing_is_an_error() -> None:
    with pytest.raises(GateError, match="no benchmark was measured"):
        Side().add(report({}))


def test_a_baseline_of_another_machine_is_none_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "baseline.json"
    assert read_baseline(path, "here") is None
    ours, theirs = side({NAME: [[1.0, 2.0]] * 4}), side({NAME: [[3.0, 4.0]] * 4})
    write_baseline(path, "there", theirs, "c1")
    assert read_baseline(path, "here") is None
    write_baseline(path, "here", ours, "c2")
    assert read_baseline(path, "here") == ours
    assert read_baseline(path, "there") == theirs
    assert json.loads(path.read_text())["here"]["commit"] == "c2"
    assert [one.name for one in path.parent.iterdir()] == ["baseline.json"]
    path.write_text(path.read_text()[:-9])  # cut off, as by a full disk
    cut = path.read_text()
    for use in (lambda: read_baseline(path, "here"), lambda: write_baseline(path, "x", ours, "c")):
        with pytest.raises(GateError, match=r"baseline.json is no baseline .* give another file"):
            use()
    assert path.read_text() == cut


@pytest.mark.parametrize(
    "text",
    [
        "[1]",
        '{"here": 1}',
        '{"here": {"benchmarks": {"a": 1}}}',
        '{"here": {"benchmarks": {"a": {"workload": "w", "processes": []}}}}',
        '{"here": {"benchmarks": {"a": {"workload": "w", "processes": [[]]}}}}',
        '{"here": {"benchmarks": {"a": {"workload": "w", "processes": [["1"]]}}}}',
        '{"here": {"benchmarks": {"a": {"workload": "w", "processes": [[0.0]]}}}}',
        None,
    ],
)
def test_what_is_no_baseline_is_an_error_before_anything_is_measured(
    tmp_path: Path, text: str | None
) -> None:
    path = tmp_path / "baseline.json"
    path.mkdir() if text is None else path.write_text(text)
    what = "cannot be read" if text is None else "is no baseline"
    with pytest.raises(GateError, match=rf"baseline.json {what} \(.*\): give another file"):
        read_baseline(path, "here")


def test_a_baseline_keeps_what_a_run_measured_too_little_of_or_not_at_all() -> None:
    """Else a run of some benchmarks (-k), or one that was short of time, lets the next one pass."""
    whole, few = [[1.0, 2.0]] * 4, [[3.0, 4.0]]
    base = side({"compared": whole, "few": whole, "not run": whole})
    measured = {"compared": [[3.0, 4.0]] * 4, "few": few, "new": few}
    head = Side({name: Sample("w", rounds) for name, rounds in measured.items()})
    found = kept(base, head, judged(base, head, paired=False)).samples
    assert {name: sample.processes for name, sample in found.items()} == {
        "compared": whole, "few": whole, "not run": whole, "new": few,
    }  # fmt: skip
    changed = side({"few": few}, workload="changed")
    assert kept(base, changed, judged(base, changed)).samples["few"].processes == few
    more = kept(side({"few": few}), base, judged(side({"few": few}), base)).samples
    assert more["few"].processes == whole


def test_a_machine_is_its_hardware_driver_and_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    from harness.machine import hardware

    machine = {"fingerprint": "f", "versions": {"python": "3.11.7", "torch": "2", "numpy": "2"}}
    monkeypatch.setattr(hardware, "capture", lambda: machine)
    first = machine_key()
    assert first == machine_key() and len(first) == 12
    # Of CPU, cores, memory, GPUs and driver: tests/harness/machine/test_hardware.py
    machine["fingerprint"] = "g"
    second = machine_key()
    machine["versions"] = {"python": "3.11.7", "torch": "3", "numpy": "2"}
    assert len({first, second, machine_key()}) == 3
