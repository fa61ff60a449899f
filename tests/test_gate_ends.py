"""scripts/gate.py where it judges nothing: command lines that it refuses, and where it is ended."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.fake_engine import alive, wait_until
from tests.support.gate_repo import commit, make

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[1:3]
import gate
gate.ROOT = Path(sys.argv[3])
gate.end_in_order()
sys.exit(gate.main(["--timer=clock.now"]))
"""
HANGS = """
import os, time
from pathlib import Path
def step():
    Path(BEGAN, str(os.getpid())).touch()
    time.sleep(300)
"""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import gate

    return gate


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--processes=0"], "--processes: 0: give a whole number above 0"),
        (["--floor=-1"], "--floor: -1: give a number above 0"),
        (["--floor=nan"], "--floor: nan: give a number above 0"),
        (["--base=HEAD", "--baseline=f"], "--baseline: not allowed with argument --base"),
        (["--record"], "--record: of which file? give --baseline FILE"),
    ],
)
def test_a_command_line_that_would_judge_nothing_is_refused(
    words: list[str], told: str, script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        script.main(words)
    assert ended.value.code == 2 and told in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_that_is_ended_leaves_no_process_and_no_work_tree(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    repo, began = make(tmp_path / "repo"), tmp_path / "began"
    began.mkdir()
    commit(repo, "hangs", **{"product.py": f"BEGAN = {str(began)!r}\n{HANGS}"})
    commit(repo, "docs")

    def trees() -> int:
        command = ["git", "worktree", "list"]
        return len(subprocess.run(command, cwd=repo, capture_output=True).stdout.splitlines())

    command = [sys.executable, "-c", PROGRAM, str(ROOT / "scripts"), str(ROOT), str(repo)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        assert wait_until(lambda: any(began.iterdir()), 60) and trees() == 2
        process.send_signal(number)  # to it alone
        try:
            process.wait(60)
        finally:
            process.kill()
    assert process.returncode == {"SIGTERM": 143, "SIGINT": -signal.SIGINT}[number.name]
    assert trees() == 1
    pids = [int(file.name) for file in began.iterdir()]
    assert pids and not any(map(alive, pids))


def test_benchmarks_that_are_only_listed_are_no_measurement(
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.setattr(script, "ROOT", make(tmp_path / "repo"))
    words = ["--baseline=no-file", "--timer=clock.now", "--", "--collect-only"]
    assert script.main(words) == 2
    assert "error: " in capsys.readouterr().err


def test_a_benchmark_that_takes_no_turns_is_refused(
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On the head's side an error that names it, on the base's what keeps the gate from judging."""
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    repo = make(tmp_path / "repo")
    monkeypatch.setattr(script, "ROOT", repo)
    own = "import product\ndef test_own(benchmark):\n    benchmark(product.step)\n"
    commit(repo, "own", **{"tests/benchmarks/test_b.py": own})
    words = ["--processes=1", "--timer=clock.now"]
    told = "a benchmark here takes the fixture measure, not benchmark: measure(function, setup="
    assert script.main(words) == 2
    said = capsys.readouterr()
    assert said.out == "" and told in said.err and "test_b.py::test_own" in said.err
    mended = own.replace("(benchmark", "(measure").replace("    benchmark", "    measure")
    commit(repo, "mended", **{"tests/benchmarks/test_b.py": mended})
    assert script.main(words) == 0
    said = capsys.readouterr()
    assert "recorded, not judged: the base's benchmarks failed: " in said.out and told in said.out
    assert "| test_own | 1,000 | - | - | - |" in said.out
