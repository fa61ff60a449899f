from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from rich.console import Console

from harness.measuring.stats import relative_noise, summary, t95
from harness.rows.figures import FigureRows
from harness.sweep.point import status_only_tables
from harness.tables import export, report
from harness.tables.point_files import write_point
from tests.support.fake_backend import make_cfg, make_point


def write(
    run: Path, index: int, status: str = "ok", rates: tuple[float, ...] = (), process: int = 0,
    reason: str | None = None, notes: str | None = None, **changes: Any,
) -> None:  # fmt: skip
    """A point with `rates` as output tok/s of its repeats, TPOT 20 ms, shares and steps."""
    point_id = f"{index:012x}"
    point = make_point(make_cfg(**changes), point_id, index)
    tables = status_only_tables(
        point, status, reason, run_id=run.name, process=process, notes=notes
    )
    columns = dict(tables["points"])
    if rates:
        columns = {name: values * len(rates) for name, values in columns.items()}
        columns["repeat"] = list(range(len(rates)))
        rows = FigureRows({"run_id": run.name, "point_id": point_id, "process": process})
        for repeat, rate in enumerate(rates):
            rows.add("output_tok_s", rate, n=1, pass_name="plain", repeat=repeat)
        rows.summarise("output_tok_s", rates, pass_name="plain")
        rows.summarise("tpot", [0.02], pass_name="plain")
        rows.summarise("ttft", [0.04, 0.05, 0.09], pass_name="plain")
        for phase, factor in (("prefill", 10), ("decode", 1)):
            rows.summarise("step_us", [400.0 * factor], pass_name="plain", phase=phase, ranks="min")
            rows.summarise("step_us", [500.0 * factor], pass_name="plain", phase=phase, ranks="max")
            rows.add("comm_share", 0.1 * factor, n=9, pass_name="host", phase=phase, ranks="max")
        rows.add("comm_share", 0.55, n=9, pass_name="host", ranks="max")
        tables["metrics"] = rows.table()
    tables["points"] = columns
    write_point(run / "points" / f"{point_id}-{process}", tables)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    write(folder, 2, rates=(150.0, 160.0), tp=2, batch=1)
    write(folder, 0, rates=(100.0,), tp=1, batch=1)
    write(folder, 1, rates=(300.0, 300.0), tp=1, batch=4)
    write(folder, 3, "skipped", tp=2, batch=4, enforce_eager=False, reason="needs a GPU")
    write(folder, 4, "error", tp=2, batch=4, reason="boom")
    write(folder, 5, "contaminated", rates=(500.0,), tp=2, batch=4, compile="model", reason="built")
    return folder


def test_a_row_a_point_in_the_order_of_the_run(run: Path) -> None:
    frame = report.summary(run)
    assert frame["index"].tolist() == [0, 1, 2, 3, 4, 5]
    assert frame["status"].tolist() == ["ok", "ok", "ok", "skipped", "error", "contaminated"]
    assert frame["repeats"].tolist() == [1, 2, 2, 0, 0, 1]
    assert frame["output_tok_s"][:3].tolist() == [100.0, 300.0, 155.0]
    assert frame["output_tok_s"][3:5].isna().all() and frame["tpot_p50_s"][3:5].isna().all()
    assert frame["output_tok_s"][5] == 500.0
    assert frame["reason"].fillna("").tolist() == ["", "", "", "needs a GPU", "boom", "built"]


def test_figures_of_a_step_are_of_decode_steps_and_the_slowest_rank(run: Path) -> None:
    row = report.summary(run).iloc[2]
    assert (row["phase"], row["step_p50_us"], row["comm_share"]) == ("decode", 500.0, 0.1)
    assert row["spread"] == pytest.approx(50**0.5 / 155)


def test_scaling_efficiency_needs_an_equal_single_rank_that_is_ok(run: Path) -> None:
    found = report.summary(run)["scaling_efficiency"]
    assert found[:3].tolist() == [1.0, 1.0, pytest.approx(155 / 200)]
    assert found[3:].isna().all()
    write(run, 6, rates=(90.0,), tp=2, batch=1, page_size=32)
    assert pd.isna(report.summary(run)["scaling_efficiency"][6])


def test_scaling_efficiency_pairs_points_that_are_equal_in_every_setting(tmp_path: Path) -> None:
    points = [(1, 32, 100.0), (2, 32, 150.0), (1, 64, 400.0), (2, 64, 600.0)]
    run = tmp_path / "run"
    for index, (tp, out, rate) in enumerate(points):
        write(run, index, rates=(rate,), tp=tp, workload__output_tokens=out)
    assert report.summary(run)["scaling_efficiency"].tolist() == [1, 0.75, 1, 0.75]
    write(run, 4, rates=(90.0,), tp=2, engine__seed=3)
    write(run, 5, rates=(150.0,), tp=2, workload__output_tokens=32, comm="gloo", resume="never")
    frame = report.summary(run)
    assert pd.isna(frame["scaling_efficiency"][4]), "no single rank had this seed"
    assert frame["scaling_efficiency"][5] == 0.75
    headings, rows, _ = report.view(frame)
    assert "resume" not in headings
    assert [row[headings.index("engine.seed")] for row in rows] == ["0", "0", "0", "0", "3", "0"]


@pytest.mark.parametrize("order", [("oom", "error", "ok"), ("ok", "error", "oom")])
def test_a_point_has_the_worst_status_of_its_engines(
    tmp_path: Path, order: tuple[str, ...]
) -> None:
    for process, status in enumerate(order):
        write(tmp_path / "run", 0, status, process=process, reason=f"why {status}")
    row = report.summary(tmp_path / "run").iloc[0]
    assert (row["status"], row["reason"]) == ("oom", "why oom")


def test_a_point_of_several_engines_is_one_row(run: Path) -> None:
    for process, rate in ((1, 120.0), (2, 140.0)):
        write(run, 0, rates=(rate,), process=process, tp=1, batch=1)
    row = report.summary(run).iloc[0]
    assert (row["n_process"], row["repeats"], row["output_tok_s"]) == (3, 3, 120.0)
    assert row["spread"] == pytest.approx(relative_noise([100.0, 120.0, 140.0]))
    write(run, 0, "error", process=3, reason="died", tp=1, batch=1)
    row = report.summary(run).iloc[0]
    assert (row["status"], row["reason"]) == ("error", "died")
    assert pd.isna(row["output_tok_s"])


def test_the_printed_table_has_every_point_with_its_reason(run: Path) -> None:
    console = Console(width=200, file=io.StringIO())
    report.print_summary(run, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    lines = [line for line in text.splitlines() if line.split(maxsplit=1)[:1] != []]
    by_status = [line for line in lines if line.startswith(("ok", "skipped", "error", "contam"))]
    assert len(by_status) == 6
    assert "155" in by_status[2] and "20.00" in by_status[2] and "0.78" in by_status[2]
    assert "needs a GPU" in by_status[3] and " 0 " not in by_status[3]


@pytest.mark.parametrize("width", [10, 40, 80, 300])
def test_no_figure_or_setting_is_broken_at_any_width(run: Path, width: int) -> None:
    """Every row's words but the reason's stand whole on one line; brackets are text."""
    reason = "a longer explanation [in brackets] that wraps " * 3
    write(run, 6, "error", tp=2, batch=1, attention="flash2", reason=reason)
    console = Console(width=width, file=io.StringIO())
    report.print_summary(run, console)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    headings, rows, same = report.view(report.summary(run))
    assert lines[0] == same
    found = [line.split() for line in lines if line.startswith(("ok", "skip", "error", "contam"))]
    assert [words[: len(headings) - 1] for words in found] == [row[:-1] for row in rows]
    last = lines.index(
        next(line for line in lines if line.startswith("error   ") and "fla" in line)
    )
    column = lines[last].index("a longer")
    wrapped = " ".join(" ".join(line[column:].split()) for line in lines[last:])
    assert wrapped.split() == reason.split()
    assert (len(lines) > last + 1) == (width < 300)


def test_arrivals_that_set_the_throughput_give_no_efficiency(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for index, (tp, arrivals) in enumerate(
        (tp, arrivals) for arrivals in ("all", "trace", "poisson(4)") for tp in (1, 2)
    ):
        write(run, index, rates=(100.0,), tp=tp, workload__kind="trace",
              workload__arrivals=arrivals)  # fmt: skip
    frame = report.summary(run)
    assert frame["scaling_efficiency"].fillna(-1).tolist() == [1.0, 0.5, -1, -1, -1, -1]
    assert frame["scaling_reason"].isna().tolist() == [True, True, False, False, False, False]
    assert set(frame["scaling_reason"][2:]) == {
        "requests arrive over time, which sets the throughput"
    }
    write(run, 6, "error", tp=1, reason="boom")
    write(run, 7, rates=(100.0,), tp=2)
    assert report.summary(run)["scaling_reason"][6:].tolist() == [
        "the point is error", "the point of tp=1 with these settings is error"
    ]  # fmt: skip
    assert [line for line in report.markdown(run).splitlines() if line.startswith("no ")] == [
        "no scaling efficiency where requests arrive over time, which sets the throughput.",
        "no scaling efficiency at tp=2 (1 point): the point of tp=1 with these settings is error.",
    ]


def test_points_of_a_busy_machine_are_counted_below_the_table(run: Path) -> None:
    assert report.remarks(report.summary(run)) == []
    note = "busy machine: other processes used 1.5 of 2 cores during the plain pass"
    write(run, 6, rates=(90.0,), notes=f"2 of 4 requests shortened; {note}", tp=1, batch=8)
    write(run, 0, rates=(100.0,), notes=note, process=1, tp=1, batch=1)
    frame = report.summary(run)
    assert frame["notes"][0] == note
    console = Console(width=200, file=io.StringIO())
    report.print_summary(run, console)
    printed = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    write(run, 0, rates=(100.0,), notes=note.replace("1.5", "1.6"), process=2, tp=1, batch=1)
    write(run, 0, rates=(100.0,), notes=note.replace("1.5", "1.7"), process=3, tp=1, batch=1)
    said = report.view(report.summary(run))[1][0][-1]
    assert said == f"{note}; so were 2 more of its engines"
    # The row itself says it too, without the note's other half.
    assert sum("busy machine: other" in line for line in printed) == 2
    assert not any("requests shortened" in line for line in printed)
    assert printed[-1] == (
        "2 points were measured on a busy machine: do not trust times of a CPU there"
    )


def test_markdown_and_csv_are_views_of_the_same_rows(run: Path) -> None:
    table = [line for line in report.markdown(run).splitlines() if line.startswith("|")]
    assert len(table) == 8
    assert table[0].startswith("| status | tp | batch | eager | compile | output tok/s | +- % |")
    assert table[4].startswith("| ok | 2 | 1 | true | off | 155 | 4.6 | 20.00 | 500 |")
    assert table[5].startswith("| skipped | 2 | 4 | false | off | - | - |")
    again = pd.read_csv(io.StringIO(export.csv(run)))
    assert again["output_tok_s"].tolist()[:3] == [100.0, 300.0, 155.0]
    assert again["output_tok_s"].isna().tolist()[3:5] == [True, True]


def test_a_trace_has_columns_of_its_arrivals(tmp_path: Path) -> None:
    write(tmp_path / "run", 0, rates=(10.0,), workload__kind="trace", workload__arrivals="trace")
    headings, rows, same = report.view(report.summary(tmp_path / "run"))
    assert "TTFT\nms" in headings
    assert rows[0][headings.index("queue\nms")] == "-"
    assert "workload=trace" in same and "workload.arrivals=trace" in same


def test_first_tokens_are_shown_where_they_are_what_is_measured(tmp_path: Path) -> None:
    """A prefill makes one token a request: without TTFT its table had steps and no latency."""
    for kind, shown in (("decode", None), ("prefill", "50.0")):
        write(tmp_path / kind, 0, rates=(10.0,), workload__kind=kind)
        headings, rows, _ = report.view(report.summary(tmp_path / kind))
        assert dict(zip(headings, rows[0], strict=True)).get("TTFT\nms") == shown


def test_statistics_against_known_values() -> None:
    found = summary([1.0, 2.0, 3.0, 4.0])
    assert (found["p50"], found["mean"], found["min"], found["max"]) == (2.5, 2.5, 1.0, 4.0)
    assert found["p90"] == pytest.approx(3.7) and found["p99"] == pytest.approx(3.97)
    assert found["std"] == pytest.approx(1.2909944)
    assert found["ci_lo"] == pytest.approx(2.5 - 3.182 * 1.2909944 / 2)
    assert [summary([7.0])[k] for k in ("p50", "std", "ci_lo")] == [7.0, None, None]
    assert set(summary([]).values()) == {None}
    assert relative_noise([5.0]) is None
    assert relative_noise([9.0, 10.0, 11.0]) == pytest.approx(0.1)


def test_t_quantiles_against_scipy() -> None:
    scipy_stats = pytest.importorskip("scipy.stats")
    for df in (1, 2, 9, 30, 31, 60, 1000):
        assert t95(df) == pytest.approx(scipy_stats.t.ppf(0.975, df), abs=0.004)


def test_a_percentile_below_two_ticks_is_not_given() -> None:
    rows = FigureRows({"run_id": "r", "point_id": "p", "process": 0})
    rows.summarise("latency_us", [1.5, 2.5], pass_name="host", tick=1.024)
    found = {row["stat"]: (row["value"], row["reason"]) for row in rows.rows}
    assert found["p50"] == (None, "below two ticks of the timer (2.05)")
    assert found["p99"] == (pytest.approx(2.49), None)
    assert found["mean"] == (2.0, None)  # the mean of many is finer than a tick
    rows.rows.clear()
    rows.summarise("latency_us", [0.0, 0.0], pass_name="host", tick=1.024)
    assert {r["value"] for r in rows.rows if r["stat"].startswith("p")} == {None}
    rows.rows.clear()
    rows.summarise("wait_us", [0.0, 0.0], pass_name="host", ranks="min")
    assert {r["value"] for r in rows.rows if r["stat"].startswith("p")} == {0.0}


def test_a_disturbed_single_rank_is_flagged_in_the_rows_that_divide_by_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write(run, 0, rates=(50.0,), tp=1, notes="busy")
    write(run, 1, rates=(150.0,), tp=2, notes="shared")
    write(run, 2, rates=(100.0,), tp=1, batch=1)
    write(run, 3, rates=(150.0,), tp=2, batch=1)
    frame = report.summary(run)
    flag = "flag: tp=2 does 1.50 times what 2 engines of tp=1 do: was the point of tp=1 disturbed?"
    assert frame["notes"].fillna("").tolist() == ["busy", f"shared; {flag}", "", ""]
    headings, rows, _ = report.view(frame)
    assert [row[headings.index("reason")] for row in rows] == ["", flag, "", ""]
