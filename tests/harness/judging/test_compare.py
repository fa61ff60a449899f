"""`python -m harness compare`: what it prints, and the exit status that CI goes by."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from harness.__main__ import main
from tests.support.made_runs import MACHINE, noisy, write_cell

ROOT = Path(__file__).resolve().parents[3]
SEEDS = {"a": (0, 100.0), "same": (2, 100.0), "slow": (1, 90.0), "fast": (3, 112.0)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of two cells, of which batch=2 is as SEEDS say; `noisy` is undecided."""
    folder = tmp_path_factory.mktemp("runs")
    steady = {"between": 0.005, "within": 0.01}
    for name, (seed, centre) in SEEDS.items():
        write_cell(folder / name, noisy(5, 6, seed=seed, centre=centre, **steady), index=0, batch=2)
        write_cell(folder / name, noisy(5, 6, seed=9 + seed, **steady), index=1, batch=1)
    wild = [[90.0, 91.0, 92.0], [96.0, 97.0, 98.0], [102.0, 103.0, 104.0]]
    write_cell(folder / "noisy", wild, index=0, batch=2)
    elsewhere = noisy(5, 6, seed=7, **steady)
    write_cell(folder / "elsewhere", elsewhere, batch=2, machine={**MACHINE, "fingerprint": "m2"})
    return folder


def compare(runs: Path, a: str, b: str, *more: str) -> int:
    return main(["compare", str(runs / a), str(runs / b), *more])


@pytest.mark.parametrize(
    ("b", "more", "status"),
    [
        ("same", [], 0),
        ("fast", [], 0),
        ("slow", [], 1),
        ("noisy", [], 0),
        ("noisy", ["--fail-on", "ambiguous"], 1),
        ("same", ["--fail-on", "ambiguous"], 0),
        ("slow", ["--metrics", "tpot,output_tok_s", "--json"], 1),
        ("slow", ["--floor", "0.2"], 0),
        ("elsewhere", [], 2),
        ("elsewhere", ["--across-machines"], 0),
        ("nothing", [], 2),
        ("same", ["--metrics", "speed"], 2),
        ("same", ["--floor", "0"], 2),
        ("same", ["--fail-on", "slow"], 2),
        ("same", ["--csv", "--json"], 2),
        ("same", ["third"], 2),
    ],
)
def test_exit_status(runs: Path, b: str, more: list[str], status: int) -> None:
    assert compare(runs, "a", b, *more) == status


def test_what_is_refused_says_why_in_one_line(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compare(runs, "a", "elsewhere")
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith("compare: other machines: A is a CPU (machine-1), B a CPU (m2)")
    assert main(["compare", str(runs / "a")]) == 2
    assert "python -m harness compare A B" in capsys.readouterr().err
    for floor in ("x", "3"):
        assert compare(runs, "a", "b", "--floor", floor) == 2
        told = f"argument --floor: {floor}: give a fraction between 0 and 1, such as 0.03"
        assert told in capsys.readouterr().err


def test_the_table_names_both_runs_every_cell_and_the_counts(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compare(runs, "a", "slow", "--metrics", "output_tok_s,tpot")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "A: a, a CPU, commit 0123456, torch 2.13.0"
    assert lines[-1] == "2 SLOWER, 0 FASTER, 2 SAME, 0 AMBIGUOUS"
    words = [line.split() for line in lines if line.startswith(("SLOWER", "SAME"))]
    assert [w[:8] for w in words] == [
        ["SLOWER", "2", "2", "true", "off", "output_tok_s", "1/s", words[0][7]],
        ["SLOWER", "2", "2", "true", "off", "tpot", "ms", words[1][7]],
        ["SAME", "2", "1", "true", "off", "output_tok_s", "1/s", words[2][7]],
        ["SAME", "2", "1", "true", "off", "tpot", "ms", words[3][7]],
    ]
    assert float(words[0][7]) == pytest.approx(100, rel=0.02)
    assert float(words[1][7]) == pytest.approx(20, rel=0.02), "2 / 100 s"
    assert float(words[0][8]) / float(words[0][7]) == pytest.approx(float(words[0][9]), abs=1e-3)


def test_markdown_has_the_same_rows(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compare(runs, "a", "noisy", "--markdown")
    lines = capsys.readouterr().out.splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert table[0].startswith(
        "| verdict | tp | batch | eager | compile | metric | A | B | B / A |"
    )
    assert len(table) == 2 + 3
    assert all(line.startswith("| AMBIGUOUS | 2 | 2 | true | off |") for line in table[2:])
    assert any(line.startswith("only in A: tp=2 batch=1") for line in lines)
    assert lines[-1] == "0 SLOWER, 0 FASTER, 0 SAME, 3 AMBIGUOUS"


def test_csv_and_json_have_every_number_and_no_nan(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty"
    write_cell(empty, [], index=0, batch=2, status="error", reason="boom, twice")
    compare(runs, "a", "../" + str(empty.relative_to(tmp_path.parent)), "--json")
    text = capsys.readouterr().out

    def refuse(word: str) -> None:
        raise AssertionError(word)

    found = json.loads(text, parse_constant=refuse)
    assert found["counts"] == {"SAME": 0, "FASTER": 0, "SLOWER": 0, "AMBIGUOUS": 3}
    assert found["a"]["hardware_fingerprint"] == "machine-1"
    assert found["cells"][0]["b"] is None and found["cells"][0]["ratio"] is None
    assert found["cells"][0]["workload.output_tokens"] == 5, "all settings, not those that vary"
    assert found["only_a"] == [
        "tp=2 batch=1 enforce_eager=true compile=off (nearest: batch=2, not 1)"
    ]

    compare(runs, "a", "slow", "--csv")
    (tmp_path / "table.csv").write_text(capsys.readouterr().out)
    frame = pd.read_csv(tmp_path / "table.csv")
    assert frame["verdict"].tolist() == ["SLOWER"] * 3 + ["SAME"] * 3
    assert (frame["a_lo"] < frame["a"]).all() and (frame["ratio_hi"] > frame["ratio"]).all()
    assert frame["a_n_process"].tolist() == [5] * 6


def test_published_repeats_compare_like_the_run_itself(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (runs / "slow" / "plan.json").write_text("{}")
    assert main(["collect", str(runs / "slow"), "--repeats"]) == 0
    (tmp_path / "repeats.csv").write_text(capsys.readouterr().out)
    assert compare(runs, "a", "slow", "--csv") == 1
    of_run = pd.read_csv(io.StringIO(capsys.readouterr().out))
    assert main(["compare", str(runs / "a"), str(tmp_path), "--csv"]) == 1
    pd.testing.assert_frame_equal(pd.read_csv(io.StringIO(capsys.readouterr().out)), of_run)


def test_the_command_itself(runs: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "harness", "compare", str(runs / "a"), str(runs / "slow")],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.splitlines()[-1] == "3 SLOWER, 0 FASTER, 3 SAME, 0 AMBIGUOUS"
