"""Exports of a run: strict JSON whose rows stand alone, CSV with the same columns for every run"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pandas as pd
import pytest

from harness.__main__ import main
from harness.rows.figures import FigureRows
from harness.store import load
from harness.tables import export, report
from harness.tables.point_files import write_point
from tests.support.made_runs import write_cell

MACHINE = {
    "fingerprint": "f00", "host": "node7", "cpu": "a CPU", "cpu_cores": 2, "gpus": [{"name": "G"}],
    "driver": "570", "git": {"sha": "abc123", "dirty": True},
    "versions": {"python": "3.12", "torch": "2.13", "nccl": "2.27"},
}  # fmt: skip


AS_WRITTEN: dict[str, Any] = {
    "measure__min_repeats": 3, "measure__max_repeats": 10, "measure__point_timeout_s": 600.0,
    "measure__startup_timeout_s": 900.0, "measure__skew_us": [0.0, 50.0, 250.0, 1000.0],
    "instrument": ["collectives", "nvtx", "counts"], "engine__max_num_seqs": 2,
}  # fmt: skip
"""What makes the tests' configuration one without a setting that differs from its default."""


def strict(text: str) -> Any:
    """JSON as its standard has it: Python's own reader takes NaN and Infinity too."""

    def refuse(word: str) -> NoReturn:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "a"
    write_cell(folder, [[100.0, 110.0]], index=0, machine=MACHINE, tp=1)
    write_cell(folder, [[150.0, 150.0]], index=1, machine=MACHINE, tp=2)
    write_cell(folder, [], index=2, status="skipped", reason="needs a GPU", machine=MACHINE,
               enforce_eager=False)  # fmt: skip
    return folder


def test_any_row_says_alone_what_it_is_of(run: Path) -> None:
    found = strict(export.to_json(run))
    assert (found["format"], found["version"]) == ("rangefinder.summary", 1)
    assert [row["status"] for row in found["rows"]] == ["ok", "ok", "skipped"]
    for place, row in enumerate(found["rows"]):
        said = {name: row[name] for name in (
            "run_id", "model", "tp", "dtype", "enforce_eager", "compile", "git_sha", "git_dirty",
            "host", "hardware_fingerprint", "gpu", "driver", "torch_version", "nccl_version",
        )}  # fmt: skip
        assert said == {
            "run_id": "a", "model": "tiny", "tp": [1, 2, 2][place], "dtype": "auto",
            "enforce_eager": place < 2, "compile": "off", "git_sha": "abc123", "git_dirty": True,
            "host": "node7", "hardware_fingerprint": "f00", "gpu": "G", "driver": "570",
            "torch_version": "2.13", "nccl_version": "2.27",
        }  # fmt: skip
        assert row["settings"]["workload.output_tokens"] == 5
        assert row["settings"]["measure.rel_noise"] == 0.05
    assert found["units"]["output_tok_s"] == "1/s" and found["units"]["tpot_p50_s"] == "s"


def test_figures_are_those_of_the_summary_and_a_missing_one_has_a_reason(run: Path) -> None:
    one, two, skipped = strict(export.to_json(run))["rows"]
    assert (one["output_tok_s"], two["output_tok_s"]) == (105.0, 150.0)
    assert two["scaling_efficiency"] == pytest.approx(150 / 210)
    assert two["spread"] == 0.0 and "spread" not in two["reasons"]
    for row in (one, two, skipped):
        missing = [name for name in export.NULLABLE if row[name] is None]
        assert sorted(row["reasons"]) == sorted(missing)
        assert all(row["reasons"].values())
    assert one["reasons"]["mbu"] == "not measured, and metrics gives no reason"
    assert set(skipped["reasons"].values()) == {"the point is skipped: needs a GPU"}
    assert skipped["output_tok_s"] is None


def test_reasons_are_those_of_the_tables(run: Path) -> None:
    folder = run / "points" / "000000000000-0"
    key = {"run_id": "a", "point_id": "0" * 12, "process": 0}
    rows = FigureRows(key)
    rows.add("mbu", None, n=0, pass_name="plain", reason="no ceiling", phase="decode")
    for phase, reason in (("mixed", "no such step"), ("decode", "tp=1 has no collectives")):
        where = {"pass_name": "host", "phase": phase, "ranks": "max"}
        rows.summarise("wait_us_per_step", [], reason=reason, **where)
    rows.summarise("step_us", [5.0], pass_name="plain", phase="decode", ranks="max")
    memory = {**key, "repeat": 0, "rank": 0, "name": "peak_bytes", "reason": "not readable"}
    tables: dict[str, Any] = {"points": load(run).points.head(1), "metrics": rows.table()}
    tables["memory"] = {name: [value] for name, value in memory.items()}
    write_point(folder, tables)
    row = strict(export.to_json(run))["rows"][0]
    assert row["reasons"]["mbu"] == "no ceiling"
    assert row["reasons"]["memory_peak_bytes"] == "not readable"
    assert (row["step_p50_us"], row["phase"]) == (5.0, "decode")
    assert row["reasons"]["wait_us_per_step"] == "tp=1 has no collectives"
    assert row["reasons"]["ttft_p50_s"] == "not measured, and metrics gives no reason"
    assert row["reasons"]["scaling_efficiency"] == "the point has no output_tok_s"


def test_every_run_has_the_same_columns(run: Path, tmp_path: Path) -> None:
    """Whatever was measured, skipped or asked for; other settings that vary come on top."""
    bare = tmp_path / "runs" / "bare"
    write_cell(bare, [], status="error", reason="boom")
    more = tmp_path / "runs" / "more"
    for index, prompt in enumerate((8, 16)):
        write_cell(more, [[1.0]], index=index, workload__seed=prompt)
    headers = [export.csv(one).splitlines()[0].split(",") for one in (run, bare, more)]
    assert headers[0] == headers[1]
    assert [name for name in headers[2] if name not in headers[0]] == ["workload.seed"]
    assert {*report.FIGURE_OF, *export.ORIGIN} <= set(headers[0])


def test_a_setting_that_was_changed_alike_in_all_rows_is_told(tmp_path: Path) -> None:
    """In the header, in a column of its own, and in no column of the printed table."""
    asked = {"engine.fused": "none", "engine.prefix_cache": True, "engine.max_num_seqs": 4,
             "workload.temperature": 0.7, "workload.num_requests": 4,
             "measure.min_repeats": 2}  # fmt: skip
    plain, changed = tmp_path / "plain", tmp_path / "changed"
    for index, batch in enumerate((1, 2)):
        settings = {**AS_WRITTEN, "engine__max_num_seqs": 2, "batch": batch}
        write_cell(plain, [[1.0]], index=index, **settings)
        settings |= {name.replace(".", "__"): value for name, value in asked.items()}
        write_cell(changed, [[1.0]], index=index, **settings)
    before, after = report.summary(plain), report.summary(changed)
    assert {name for name in after if name not in before} == set(asked)
    assert report.further(before) == [], "nothing was changed there"
    headings, rows, same = report.view(after)
    assert (headings, rows) == report.view(before)[:2]
    told = [part for part in same.split(", ") if part.split("=")[0] in asked]
    assert set(told) == {
        "engine.fused=none", "engine.prefix_cache=true", "engine.max_num_seqs=4",
        "workload.temperature=0.7", "workload.num_requests=4", "measure.min_repeats=2",
    }  # fmt: skip
    assert export.markdown(changed).splitlines()[0] == same
    again = pd.read_csv(io.StringIO(export.csv(changed)))
    assert again[list(asked)].drop_duplicates().to_dict("records") == [asked]


def test_a_setting_of_some_runs_stands_in_the_rows_of_all(tmp_path: Path) -> None:
    """A folder of runs is one table: a run that left a setting alone has its default there."""
    write_cell(tmp_path / "a", [[1.0]], **AS_WRITTEN)
    write_cell(tmp_path / "b", [[1.0]], **{**AS_WRITTEN, "workload__temperature": 0.7})
    for frame in (export.frame(tmp_path), load(tmp_path).summary):
        assert frame["workload.temperature"].tolist() == [0.0, 0.7]


def test_csv_reads_back(run: Path) -> None:
    again = pd.read_csv(io.StringIO(export.csv(run)))
    assert again["output_tok_s"][:2].tolist() == [105.0, 150.0] and np.isnan(again["mbu"][0])
    assert again["host"].tolist() == ["node7"] * 3


def test_markdown_says_what_it_was_measured_on(run: Path) -> None:
    text = export.markdown(run)
    assert text.startswith(report.markdown(run))
    assert text.splitlines()[-1] == (
        "a, G (f00) of node7, commit abc123 with changed files, python 3.12, torch 2.13, nccl 2.27"
    )


def test_several_runs_are_told_apart(run: Path) -> None:
    write_cell(run.parent / "b", [[7.0]], index=0, tp=1)  # the same point in another run
    found = strict(export.to_json(run.parent))["rows"]
    rates = [(row["run_id"], row["output_tok_s"]) for row in found]
    assert rates == [("a", 105.0), ("a", 150.0), ("a", None), ("b", 7.0)]
    assert found[3]["scaling_efficiency"] == 1.0


def test_collect_prints_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "plan.json").write_text("{}")
    assert main(["collect", str(run), "--json"]) == 0
    assert strict(capsys.readouterr().out) == strict(export.to_json(run))
