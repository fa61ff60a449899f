"""scripts/gate.py on small repositories: what it compares, what it says, how it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from harness.judging import gate as judging
from harness.judging.gate import GateError
from tests.support.gate_repo import commit, git, make, write
from tests.support.measuring import planted

ROOT = Path(__file__).resolve().parents[1]
SLOW = {"product.py": "import clock\ndef step(): clock.work(1.3e-3)\n"}
Gate = Callable[..., tuple[int, str]]


def by_hand(
    trees: Sequence[Path], timer: str, arguments: Sequence[Sequence[str]], pair: int = 0
) -> list[dict[str, Any] | GateError]:
    """Instead of `measure`: what a tree's measured.json says, {benchmark: ms} or an error, with a
    little of each process's own."""
    found: list[dict[str, Any] | GateError] = []
    for tree in trees:
        said = json.loads((tree / "tests/benchmarks/measured.json").read_text())
        if isinstance(said, str):
            found.append(GateError(said))
            continue
        by_hand.calls += 1  # type: ignore[attr-defined]
        own = 1 + by_hand.calls % 7 / 1000  # type: ignore[attr-defined]
        found.append(
            {
                "benchmarks": [
                    {
                        "fullname": f"tests/benchmarks/test_a.py::{name}",
                        "extra_info": {"workload": "w"},
                        "stats": {"data": [ms * 1e-3 * own] * 5},
                    }
                    for name, ms in said.items()
                ]
            }
        )
    return found


def measured(said: object) -> dict[str, str]:
    return {"tests/benchmarks/measured.json": json.dumps(said)}


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # pytest-benchmark would take the processes that are started here for workers.
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    return make(tmp_path / "repo")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, repo: Path) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import gate as script

    monkeypatch.setattr(script, "ROOT", repo)
    monkeypatch.setattr(judging, "machine_key", lambda: "this")
    return script


@pytest.fixture
def gate(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Gate:
    """gate(...) -> (exit status, what was printed), on times that stand in a file of the tree."""
    monkeypatch.setattr(script, "measure", by_hand)
    by_hand.calls = 0  # type: ignore[attr-defined]

    def run(*words: str) -> tuple[int, str]:
        status = script.main(list(words))
        said = capsys.readouterr()
        return status, said.out + said.err

    return run


def test_a_commit_that_is_slower_by_1_3_fails_and_leaves_nothing(
    repo: Path,
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In processes that take turns, with a clock that goes by what they do."""
    commit(repo, "slow", **SLOW)
    monkeypatch.setattr(judging, "MIN_PROCESSES", 2)
    assert script.main(["--processes=2", "--timer=clock.now"]) == 1
    assert "| test_step | 1,300 | 1.300 | 1.300 to 1.300 | SLOWER |" in capsys.readouterr().out
    trees = subprocess.run(["git", "worktree", "list"], cwd=repo, capture_output=True, text=True)
    assert len(trees.stdout.splitlines()) == 1


def test_zero_benchmarks_fail(
    repo: Path, script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    skipped = "import pytest\ndef test_step(measure):\n    pytest.skip('no device')\n"
    write(repo, **{"tests/benchmarks/test_a.py": skipped})
    assert script.main(["--baseline=no-file", "--timer=clock.now"]) == 2
    said = capsys.readouterr().err
    assert "error: pytest ended with status 1" in said
    assert "no benchmark was measured: each was left out or skipped" in said


def test_unchanged_code_passes_and_so_does_what_the_message_allows(repo: Path, gate: Gate) -> None:
    commit(repo, "first", **measured({"test_step": 1.0, "test_other": 1.0}))
    commit(repo, "docs")
    status, said = gate()
    assert status == 0 and said.count("| SAME |") == 2
    text = measured({"test_step": 1.3, "test_other": 1.0})
    commit(repo, "more exact\n\nSlower: test_step", **text)
    status, said = gate()
    assert status == 0 and said.count("| SLOWER |") == 1
    assert "test_step may be slower, as the commit's message says" in said
    commit(repo, "both\n\nSlower: test_step", **measured({"test_step": 1.7, "test_other": 1.3}))
    status, said = gate()
    assert status == 1 and said.count("| SLOWER |") == 2


def test_changed_files_are_compared_with_head_and_a_revision_with_itself(
    repo: Path, gate: Gate
) -> None:
    commit(repo, "first", **measured({"test_step": 1.0}))
    commit(repo, "slow", **measured({"test_step": 1.5}))
    write(repo, **measured({"test_step": 3.0}))
    status, said = gate()
    assert status == 1 and "| test_step | 3,00" in said and "| 2.00" in said
    status, said = gate("--base=HEAD~1")
    assert status == 1 and "| 3.00" in said


def test_without_a_parent_it_records_and_says_so(
    repo: Path,
    gate: Gate,
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    why = "recorded, not judged: HEAD^ is not here (a first commit, or a shallow clone"
    write(repo, **measured({"test_step": 1.0}))
    git(repo, "add", "--all")
    git(repo, "commit", "--amend", "-m", "first")
    status, said = gate()
    assert status == 0 and why in said and "| test_step | 1,001 | - | - | - |" in said
    commit(repo, "slow", **measured({"test_step": 1.3}))
    shallow = tmp_path / "shallow"
    git(tmp_path, "clone", "-q", "--depth=1", repo.as_uri(), str(shallow))
    monkeypatch.setattr(script, "ROOT", shallow)
    status, said = gate()
    assert status == 0 and why in said and "| test_step | 1,30" in said
    (shallow / ".git").rename(tmp_path / "elsewhere")
    status, said = gate()
    assert status == 0 and "recorded, not judged: git rev-parse: fatal: not a git repo" in said


@pytest.mark.parametrize("name", ["nosuch", "", "HEAD~7"])
def test_a_base_by_name_that_is_not_here_is_an_error(name: str, repo: Path, gate: Gate) -> None:
    commit(repo, "first", **measured({"test_step": 1.0}))
    said = f"error: {name} is not here (--base: fetch it, or correct the name)\n"
    assert gate(f"--base={name}") == (2, said)
    assert by_hand.calls == 0  # type: ignore[attr-defined]


def test_what_the_parent_lacks_is_recorded(repo: Path, gate: Gate) -> None:
    git(repo, "mv", "tests/benchmarks", "elsewhere")
    commit(repo, "without")
    git(repo, "mv", "elsewhere", "tests/benchmarks")
    commit(repo, "with", **measured({"test_step": 1.0}))
    status, said = gate()
    assert status == 0 and "has no tests/benchmarks" in said and "| test_step | 1,001 |" in said
    commit(repo, "another", **measured({"test_step": 1.0, "test_new": 9.0}))
    status, said = gate()
    assert status == 0 and "| SAME |" in said
    assert "| - | - | - | recorded, not judged: the base has no such benchmark |" in said


def test_a_parent_that_fails_is_no_alarm_and_a_head_that_fails_is(repo: Path, gate: Gate) -> None:
    commit(repo, "broken", **measured("pytest ended with status 1"))
    commit(repo, "mended", **measured({"test_step": 1.0}))
    status, said = gate()
    assert status == 0 and "not judged: the base's benchmarks failed: pytest ended with" in said
    write(repo, **measured("pytest ended with status 5"))
    assert gate() == (2, "error: pytest ended with status 5\n")


def test_an_alarm_is_measured_again_and_what_is_settled_is_not(
    repo: Path, gate: Gate, script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(repo, "first", **measured({"test_step": 1.0}))
    commit(repo, "docs")
    gate("--processes=4")
    assert by_hand.calls == 2 * 4  # type: ignore[attr-defined]
    commit(repo, "slow", **measured({"test_step": 1.3}))
    clock = iter(range(100))  # an alarm is confirmed however late it is
    monkeypatch.setattr(script.time, "monotonic", lambda: next(clock))
    assert gate("--processes=4", "--seconds=4.5")[0] == 1
    assert by_hand.calls == 3 * 2 * 4  # type: ignore[attr-defined]
    status, said = gate("--processes=4", "--seconds=2.5")
    assert status == 0 and "recorded, not judged: 2 processes on a side, 4 are needed" in said
    assert by_hand.calls == 3 * 2 * 4 + 2 * 2  # type: ignore[attr-defined]


def test_a_baseline_belongs_to_a_machine(
    repo: Path, gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "baseline.json"
    one = f"--baseline={path}"
    write(repo, **measured({"test_step": 1.0}))
    status, said = gate(one)
    assert status == 0
    assert f"recorded, not judged: {path} had nothing of this machine (this)" in said
    write(repo, **measured({"test_step": 1.3, "test_new": 1.0}))
    for _ in range(2):  # what was compared stays the baseline
        status, said = gate(one)
        assert status == 1 and said.count("| SLOWER |") == 1
    assert said.count("| SAME |") == 1  # the new one was recorded the first time
    monkeypatch.setattr(judging, "machine_key", lambda: "another")
    status, said = gate(one)
    assert status == 0 and "had nothing of this machine (another)" in said
    assert set(json.loads(path.read_text())) == {"this", "another"}
    monkeypatch.setattr(judging, "machine_key", lambda: "this")
    status, said = gate(one, "--record")
    assert status == 0
    assert f"recorded, not judged: --record replaced what {path} had of this machine" in said
    status, said = gate(one)
    assert status == 0 and said.count("| SAME |") == 2


def benchmarks(repo: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "tests/benchmarks", "--benchmark-only", *words]
    return subprocess.run(command, cwd=repo, capture_output=True, text=True)


def test_benchmarks_under_parallel_workers_are_refused(repo: Path) -> None:
    done = benchmarks(repo, "-n", "2")
    assert done.returncode == 4
    assert "Can't have both --benchmark-only and --benchmark-disable" in done.stderr


def test_a_planted_slow_down_lasts_as_long_as_it_says(repo: Path) -> None:
    words = ["--benchmark-timer=clock.now", "--benchmark-json=report.json", "--plant=test_step=1.5"]
    assert benchmarks(repo, *words).returncode == 0
    (one,) = json.loads((repo / "report.json").read_text())["benchmarks"]
    assert one["stats"]["data"] == pytest.approx([1.5e-3] * 5, rel=1e-4)
    assert planted(["all=1.2", "test_step[1]=1.5"], "test_step[1]") == 1.5
    assert planted(["all=1.2"], "test_step[1]") == 1.2
    assert planted(["test_other=1.5"], "test_step[1]") == 1
    with pytest.raises(pytest.UsageError, match=r"test_step=0.5: give .* a factor of at least 1"):
        planted(["test_step=0.5"], "test_step")


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux alone has it")
def test_a_pair_shares_a_core_and_pairs_take_cores_by_turns(script: ModuleType) -> None:
    """All threads of both; one that has ended is no error."""
    code = "import threading; threading.Thread(target=input).start(); print(flush=True); input()"
    command = [sys.executable, "-c", code]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    cores = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        both = [stack.enter_context(subprocess.Popen(command, **pipes)) for _ in range(2)]
        for process in both:
            assert process.stdout is not None
            process.stdout.readline()
        pids = [process.pid for process in both]
        for pair in range(len(cores) + 1):
            script.share_core(pids, pair)
            threads = [int(t) for pid in pids for t in os.listdir(f"/proc/{pid}/task")]
            assert len(threads) == 4
            found = {tuple(os.sched_getaffinity(thread)) for thread in threads}
            assert found == {(cores[pair % len(cores)],)}
        for process in both:
            process.kill()
    script.share_core(pids, 0)
    assert sorted(os.sched_getaffinity(0)) == cores
