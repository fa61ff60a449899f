"""An export read as it stands: texts, ends, numbers and versions."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pandas as pd
import pytest

from harness.nsys.reader import ExportError, pid_of, read
from tests.support.nsys_export import MACHINE, Export, tid_of


def small(registered: bool = True) -> Export:
    export = Export(registered)
    export.process(998)
    export.range("step/decode", 998, 100, 900, 8)
    export.range("all_reduce/embed", 998, 200, 300, 524288)
    export.range("free text", 998, 950, None)
    correlation = export.launch(998, 250)
    export.kernel("gemm", 998, 0, 400, 500, correlation)
    export.kernel("gemm", 998, 0, 600, 650, export.launch(998, 560), node=7)
    return export


@pytest.mark.parametrize("registered", [True, False])
def test_ranges_with_domain_category_text_and_payload(tmp_path: Path, registered: bool) -> None:
    found = read(small(registered).write(tmp_path / "a.sqlite", shuffled=1)).ranges
    assert found["message"].tolist() == ["step/decode", "all_reduce/embed", "free text"]
    assert found["domain"].tolist() == ["engine"] * 3
    assert found["category"].tolist() == ["step", "all_reduce", None]
    assert found["payload"].tolist() == [8, 524288, pd.NA]
    assert found["start_ns"].tolist() == [100, 200, 950]
    assert found["end_ns"].tolist() == [900, 300, pd.NA]
    assert set(found["pid"]) == {998} and set(found["tid"]) == {tid_of(998)}


def test_start_end_ranges_are_ranges_and_marks_are_none(tmp_path: Path) -> None:
    """Event types: 59 push/pop, 60 start/end, 34 a mark; a range that nobody closed has no end."""
    export = Export()
    export.process(998)
    export.event(60, "all_reduce/embed", tid_of(998), 2, 300, 400, category=2, payload=64)
    export.event(34, "all_reduce/embed", tid_of(998), 2, 350)
    export.event(60, "step/decode", tid_of(998), 2, 100, None, category=1, payload=8)
    export.range("step/prefill", 998, 50, 90, 4)
    for seed in range(3):
        found = read(export.write(tmp_path / "a.sqlite", shuffled=seed)).ranges
        assert found["message"].tolist() == ["step/prefill", "step/decode", "all_reduce/embed"]
        assert found["end_ns"].tolist() == [90, pd.NA, 400]
        assert found["category"].tolist() == ["step", "step", "all_reduce"]
        assert found["payload"].tolist() == [4, 8, 64]


def test_kernels_and_what_launched_them(tmp_path: Path) -> None:
    export = read(small().write(tmp_path / "a.sqlite", shuffled=2))
    assert export.kernels["name"].tolist() == ["gemm", "gemm"]
    assert export.kernels["graph_node"].tolist() == [pd.NA, 7]
    assert export.kernels["correlation"].tolist() == [1, 2]
    assert export.kernels["end_ns"].tolist() == [500, 650]
    assert export.launches[["pid", "correlation", "start_ns"]].to_numpy().tolist() == [
        [998, 1, 250],
        [998, 2, 560],
    ]
    assert (export.product, export.missing, export.whole_graphs) == ("2025.3.2.0", (), 0)


def test_the_process_stands_in_bits_24_to_47() -> None:
    # A globalTid of a real export of nsys 2025.3.2, whose process was 999.
    assert pid_of(281491737150439) == 999
    assert pid_of(MACHINE | 998 << 24) == 998


def test_domains_and_categories_are_numbered_by_each_process(tmp_path: Path) -> None:
    export = Export()
    export.process(1, domain=2, name="engine")
    export.process(2, domain=2, name="other")
    for pid in (1, 2, 3):
        export.range("step/decode", pid, pid, 10, 1)
    found = read(export.write(tmp_path / "a.sqlite")).ranges
    assert found["domain"].tolist() == ["engine", "other", None]
    assert found["category"].tolist() == ["step", "step", None]


def test_times_since_1970_keep_their_last_digit(tmp_path: Path) -> None:
    at = 1_790_000_000_123_456_789
    export = Export()
    export.process(1)
    export.range("step/decode", 1, at, at + 1)
    export.range("open", 1, at + 2, None)
    found = read(export.write(tmp_path / "a.sqlite")).ranges
    assert found["end_ns"].tolist()[0] - found["start_ns"].tolist()[0] == 1
    assert found["start_ns"].tolist() == [at, at + 2]


def test_missing_tables_are_no_fault_and_are_listed(tmp_path: Path) -> None:
    without = ["CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME", "META_DATA_EXPORT"]
    export = read(small().write(tmp_path / "a.sqlite", without=without))
    assert sorted(export.missing) == sorted(without)
    assert export.product is None and export.kernels.empty and export.launches.empty
    assert len(export.ranges) == 3
    assert read(small().write(tmp_path / "b.sqlite", without=["NVTX_EVENTS"])).ranges.empty


def test_a_column_that_older_versions_lack(tmp_path: Path) -> None:
    path = small().write(tmp_path / "a.sqlite")
    with closing(sqlite3.connect(path)) as database:
        database.execute("ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL DROP COLUMN graphNodeId")
        database.execute("ALTER TABLE NVTX_EVENTS DROP COLUMN uint64Value")
        database.commit()
    export = read(path)
    assert export.kernels["graph_node"].isna().all() and len(export.kernels) == 2
    assert export.ranges["payload"].tolist()[:2] == [8, 524288]


def test_forms_that_are_not_known_are_refused_by_name(tmp_path: Path) -> None:
    export = small()
    export.meta(EXPORT_PRODUCT_VERSION="2031.1.1.0", EXPORT_SCHEMA_VERSION="4.0.1")
    with pytest.raises(ExportError, match=r"schema version 4.0.1 \(nsys 2031.1.1.0\).* knows 3.x"):
        read(export.write(tmp_path / "a.sqlite"))
    path = small().write(tmp_path / "b.sqlite")
    with closing(sqlite3.connect(path)) as database:
        database.execute("ALTER TABLE NVTX_EVENTS RENAME COLUMN domainId TO domain")
        database.commit()
    with pytest.raises(ExportError, match=r"NVTX_EVENTS has no column domainId.*version 3.20.3"):
        read(path)


def test_what_is_no_export(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"gone.sqlite: no such file"):
        read(tmp_path / "gone.sqlite")
    text = tmp_path / "text.sqlite"
    text.write_text("not a database, but long enough to look at: " * 50)
    with pytest.raises(ExportError, match="text.sqlite is no export in sqlite: file is not a data"):
        read(text)
    report = tmp_path / "report.nsys-rep"
    report.write_bytes(b"x")
    with pytest.raises(ExportError, match="nsys export --type=sqlite report.nsys-rep"):
        read(report)
