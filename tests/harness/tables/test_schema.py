from __future__ import annotations

import re
from pathlib import Path

import pytest

from harness.tables import export, report, schema, schema_docs
from harness.tables.figures import FIGURES
from tests.support.made_runs import write_cell

DESIGNED = {
    "points": {"experiment", "status", "reason", "tp", "batch", "enforce_eager", "compile",
               "attention", "comm", "page_size", "dtype", "model", "model.path",
               "model.load_format", "workload", "measure", "timing", "instrument", "git_sha",
               "git_dirty", "hardware_fingerprint", "started_at", "wall_s"},
    "metrics": {"name", "stat", "value", "unit", "n", "n_process", "source", "reason"},
    "steps": {"rank", "pass", "step", "phase", "batch", "tokens", "bucket", "mode", "device_us",
              "host_us", "padding"},
    "collectives": {"rank", "pass", "step", "ordinal", "phase", "kind", "site", "layer", "bytes",
                    "dtype", "world", "mode", "path", "latency_us", "floor_us", "span_us",
                    "kernel_us", "transfer_us", "wait_us", "algbw_GBps", "busbw_GBps", "source",
                    "starved"},
    "requests": {"request_id", "pass", "prompt_tokens", "output_tokens", "arrival", "queue",
                 "ttft", "tpot", "e2e", "preemptions", "cached_tokens", "finish_reason"},
    "phases": {"phase", "seconds", "count"},
    "memory": {"rank", "name", "bytes"},
    "telemetry": {"name", "value", "unit"},
    "kernels": {"rank", "step", "name", "graph_node", "kernel_us"},
    "ranges": {"rank", "domain", "category", "message", "payload", "step", "host_us"},
}  # fmt: skip


def test_every_designed_column_is_there_with_its_key() -> None:
    assert set(schema.TABLES) == set(DESIGNED)
    for table, wanted in DESIGNED.items():
        names = [c.name for c in schema.TABLES[table]]
        assert wanted | {"run_id", "point_id", "repeat"} <= set(names), table
        assert len(names) == len(set(names)), table


def test_the_repeat_of_a_figure_alone_may_be_null() -> None:
    nullable = {t for t in schema.TABLES if not schema.column(t, "repeat").required}
    assert nullable == {"metrics"}


def test_units_of_times_are_in_the_catalogue() -> None:
    assert schema.column("collectives", "latency_us").unit == "us"
    assert schema.column("requests", "ttft").unit == "s"
    assert schema.column("collectives", "algbw_GBps").unit == "GB/s"
    assert schema.column("points", "tp").unit == ""
    assert {c.dtype for cs in schema.TABLES.values() for c in cs} == {
        "string", "int", "float", "bool", "time"
    }  # fmt: skip


def test_markdown_holds_every_column_and_figure() -> None:
    text = schema_docs.markdown()
    for table, columns in schema.TABLES.items():
        section = text.split(f"## {table}\n")[1].split("\n## ")[0]
        assert [line.split("`")[1] for line in section.splitlines() if line.startswith("| `")] == [
            c.name for c in columns
        ]
    assert all(f"| `{name}` | {figure.unit} |" in text for name, figure in FIGURES.items())
    rows = [line for line in text.splitlines() if line.startswith("|")]
    bars = [len(re.findall(r"(?<!\\)\|", row)) for row in rows]
    assert set(bars) == {3, 4, 5}, "a bar inside a cell is escaped"
    assert r"step/prefill\|decode\|mixed\|replay" in text


def test_every_column_of_a_summary_is_in_the_document(tmp_path: Path) -> None:
    write_cell(tmp_path / "run", [[1.0]])
    frame = export.frame(tmp_path / "run")
    section = schema_docs.markdown().split("## The summary")[1]
    settings = report.further(report.summary(tmp_path / "run"))
    named = {word for line in section.splitlines() for word in re.findall(r"`([^`]+)`", line)}
    assert {*frame.columns} - {*settings} <= named and "SETTING" in named


def test_unknown_names_are_refused_with_those_that_exist() -> None:
    with pytest.raises(KeyError, match=r"choose one of points, metrics"):
        schema.column("point", "tp")
    with pytest.raises(KeyError, match=r"steps has no column 'tps'.*device_us"):
        schema.column("steps", "tps")
