"""Every JSON that is written is JSON: no NaN, no Infinity, which other languages' readers refuse"""

from __future__ import annotations

import ast
import json
import math
from pathlib import Path
from typing import Any, NoReturn

import pyarrow.parquet as pq
import pytest

from harness.__main__ import main
from harness.calibration.file import Calibration
from harness.judging import compare
from harness.rows.tables import to_json
from tests.support.cli import Cli
from tests.support.fake_engine import behave
from tests.support.made_runs import noisy, write_cell

ROOT = Path(__file__).resolve().parents[2]
KEYS = {"experiments/eager_vs_graph.py"}
"""Files whose text is a key that nobody reads; elsewhere such a text has its keys sorted."""
IN_TABLES = ("requested", "effective", "counters", "environment")


def strict(text: str) -> Any:
    def refuse(word: str) -> NoReturn:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def lax(tree: ast.AST) -> list[int]:
    """Lines of calls of json.dump and json.dumps that would write NaN."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    named = [c for c in calls if ast.unparse(c.func) in ("json.dump", "json.dumps")]
    safe = ({"allow_nan": "False"}, {"sort_keys": "True"})
    return [
        call.lineno
        for call in named
        if not any(
            one.items() <= {k.arg: ast.unparse(k.value) for k in call.keywords}.items()
            for one in safe
        )
    ]


def test_no_writer_lets_nan_through() -> None:
    assert lax(ast.parse("json.dumps(x)\njson.dump(x, f, indent=1)")) == [1, 2]
    assert lax(ast.parse("json.dumps(x, allow_nan=False)\njson.dumps(key, sort_keys=True)")) == []
    folders = ("engine", "harness", "experiments", "scripts")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    found = {p.relative_to(ROOT).as_posix(): lax(ast.parse(p.read_text())) for p in files}
    assert {name for name, lines in found.items() if lines} == KEYS


def test_what_a_sweep_leaves_is_strict_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cli = Cli(tmp_path)
    behave(tmp_path, p1="raise")
    rule = 'skip=[{when:{batch:4},reason:"too large, as everybody knows"}]'
    with cli.start("tp=1", "batch=1,2,4", rule, "engine.max_model_len=64") as process:
        out, _ = process.communicate(timeout=120)
    last = strict(out.splitlines()[-1])
    assert (last["ok"], last["error"], last["skipped"]) == (1, 1, 1)
    run = Path(last["run"])
    files = sorted(run.rglob("*.json"))
    assert {path.name for path in files} == {"plan.json", "point.json", "finished.json"}
    for path in files:
        strict(path.read_text())
    for path in run.rglob("points.parquet"):
        table = pq.read_table(path)
        texts = [text for name in IN_TABLES for text in table[name].to_pylist() if text]
        assert texts and all(strict(text) for text in texts)
    capsys.readouterr()
    assert main(["collect", str(run), "--json"]) == 0
    rows = strict(capsys.readouterr().out)["rows"]
    assert [(row["status"], row["reason"]) for row in rows] == [
        ("ok", None),
        ("error", "RuntimeError: the fake engine was told to fail"),
        ("skipped", "too large, as everybody knows"),
    ]


def test_a_comparison_is_strict_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One cell has no figure in A, one too few repeats: their numbers are null."""
    for name, seed in (("a", 0), ("b", 1)):
        rates = noisy(5, 2, between=0.01, within=0.01, seed=seed)
        write_cell(tmp_path / name, rates, index=0)
        write_cell(tmp_path / name, [[5.0]], index=1, batch=4)
    write_cell(tmp_path / "a", [], index=2, batch=8, status="error", reason="boom")
    write_cell(tmp_path / "b", [[math.nan, 3.0]], index=2, batch=8)
    compare.main([str(tmp_path / "a"), str(tmp_path / "b"), "--json", "--metrics", "output_tok_s"])
    cells = strict(capsys.readouterr().out)["cells"]
    assert [cell["verdict"] for cell in cells][1:] == ["AMBIGUOUS", "AMBIGUOUS"]
    few, failed = cells[1:]
    assert (few["a"], few["b"], few["ratio"]) == (pytest.approx(5), pytest.approx(5), 1.0)
    assert (few["a_lo"], few["ratio_lo"], failed["a"], failed["ratio"]) == (None,) * 4
    assert few["reason"] == "A has 1 repeat; B has 1 repeat; a verdict needs 5"


def test_a_calibration_is_strict_json(tmp_path: Path) -> None:
    calibration = Calibration(tmp_path / "machine.json")
    calibration.put("part", [{"name": "read_bytes_s", "value": math.nan, "spread": math.inf}])
    (row,) = strict(calibration.path.read_text())["parts"]["part"]["rows"]
    assert row == {"name": "read_bytes_s", "value": None, "spread": None}


def test_json_in_a_column_has_null_for_what_is_no_number() -> None:
    assert strict(to_json({"b": math.inf, "a": [math.nan, 1.5]})) == {"a": [None, 1.5], "b": None}
