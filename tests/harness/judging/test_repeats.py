from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from harness.__main__ import main
from harness.judging.repeats import COLUMNS, METRICS, csv, read
from harness.store import StoreError
from harness.tables.point_files import to_arrow, write_point
from tests.support.made_runs import columns, write_cell

RATES = [[100.0, 200.0], [400.0, 500.0]]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run-1"
    write_cell(folder, RATES, index=1)
    write_cell(folder, [], index=0, status="skipped", reason="needs a GPU", enforce_eager=False)
    return folder


def test_a_row_a_repeat_with_its_own_figures_in_the_order_of_the_plan(run: Path) -> None:
    frame = read(run)
    assert list(frame.columns) == COLUMNS
    assert frame["status"].tolist() == ["skipped", "ok", "ok", "ok", "ok"]
    assert frame["process"].tolist() == [0, 0, 0, 1, 1]
    assert frame["repeat"].tolist() == [0, 0, 1, 0, 1]
    rates = [100.0, 200.0, 400.0, 500.0]
    assert frame["output_tok_s"].tolist()[1:] == rates
    # The middle request and the middle decode step on the slower rank, of the plain pass alone.
    assert frame["tpot"].tolist()[1:] == [2 / rate for rate in rates]
    assert frame["step_us"].tolist()[1:] == [1e6 / rate for rate in rates]
    assert frame["step_host_us"].tolist()[1:] == [2e6 / rate for rate in rates]
    assert frame["step_source"].tolist()[1:] == ["host"] * 4
    assert frame["tok_s_per_gpu"].isna().all(), "null with a reason, never 0"
    assert frame.iloc[0][["output_tok_s", "tpot", "step_us"]].isna().all()
    assert set(frame["hardware_fingerprint"]) == {"machine-1"}


def test_a_run_of_which_nothing_ran_has_rows_without_figures(tmp_path: Path) -> None:
    write_cell(tmp_path / "run", [], status="skipped", reason="needs a GPU")
    frame = read(tmp_path / "run")
    assert frame["reason"].tolist() == ["needs a GPU"]
    assert frame[[*METRICS, "step_source", "sm_clock_mhz"]].isna().all(axis=None)


def test_csv_reads_back_as_it_was(run: Path, tmp_path: Path) -> None:
    published = tmp_path / "published"
    published.mkdir()
    (published / "repeats.csv").write_text(csv(run), encoding="utf-8")
    for path in (published, published / "repeats.csv"):
        again = read(path)
        pd.testing.assert_frame_equal(again, read(run), check_dtype=False)
        assert again["requested"].tolist() == read(run)["requested"].tolist()


def gpu_steps(process: int, us: float) -> dict[str, Any]:
    """Of a GPU: the plain pass' log without times, then one repeat of the step pass, and others."""
    passes = [("plain", 0, None), ("plain", 1, None), ("step", 0, us), ("graph_timed", 0, 9 * us)]
    return columns(
        [
            {"run_id": "r", "point_id": "p", "process": process, "repeat": repeat, "rank": 0,
             "pass": name, "step": step, "phase": "decode", "batch": 1, "tokens": 1, "bucket": 1,
             "samples": 1, "mode": "graph", "begin_ns": 0, "device_us": device, "host_us": 70.0,
             "padding": 0.0, "source": "stamps" if name == "step" else "host"}
            for step, (name, repeat, device) in enumerate(passes)
        ]
    )  # fmt: skip


def test_on_a_gpu_the_step_pass_gives_one_step_time_an_engine(tmp_path: Path) -> None:
    for process, us in enumerate((50.0, 60.0)):
        point = {"run_id": "r", "point_id": "p", "process": process, "status": "ok"}
        point |= {"sm_clock_mhz": 1940.0 + process}
        write_point(
            tmp_path / "points" / f"p-{process}",
            {
                "points": columns([{**point, "repeat": 0}, {**point, "repeat": 1}]),
                "steps": gpu_steps(process, us),
            },
        )
    frame = read(tmp_path)
    assert frame["step_us"].tolist()[::2] == [50.0, 60.0]
    assert frame["step_us"][1::2].isna().all()
    assert frame["step_source"].dropna().tolist() == ["stamps", "stamps"]
    assert frame["step_host_us"].tolist() == [70.0] * 4
    assert frame["sm_clock_mhz"].tolist() == [1940.0, 1940.0, 1941.0, 1941.0]


def test_steps_are_of_decode_where_there_is_one_else_of_prefill(tmp_path: Path) -> None:
    rows = gpu_steps(0, 50.0)
    rows["phase"] = ["prefill"] * len(rows["phase"])
    point = {"run_id": "r", "point_id": "p", "process": 0, "repeat": 0, "status": "ok"}
    write_point(tmp_path / "points" / "p", {"points": columns([point]), "steps": rows})
    assert read(tmp_path)["step_us"].tolist() == [50.0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("index,point_id,status,spread\n0,a,ok,0.1\n", "is the summary of a run, which has no rep"),
        ("a,b\n1,2\n", "is another table"),
        ('a,b\n"1,2\n', "is no CSV"),
        ("", "is no CSV"),
    ],
)
def test_another_csv_is_refused_by_what_it_is(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "repeats.csv").write_text(text)
    with pytest.raises(StoreError, match=message):
        read(tmp_path)


@pytest.mark.parametrize(
    ("column", "value", "what"),
    [
        ("requested", "", "requested=.*: it may not be empty"),
        ("requested", "{bad", "requested={bad: no JSON object"),
        ("requested", "[1]", r"requested=\[1\]: no JSON object"),
        ("effective", "{bad", "effective={bad: no JSON object"),
        ("status", "great", "status=great: none of ok, "),
        ("status", "", "status=.*: it may not be empty"),
        ("output_tok_s", "fast", "output_tok_s=fast: no number"),
        ("sm_clock_mhz", "x", "sm_clock_mhz=x: no number"),
        ("process", "x", "process=x: no number"),
        ("process", "", "process=nan: it may not be empty"),
        ("run_id", "", "run_id=.*: it may not be empty"),
        ("repeat", "1", "point_id=.*: this repeat stands there twice"),
    ],
)
def test_a_damaged_value_is_an_error_that_names_its_row_and_no_verdict(
    run: Path, tmp_path: Path, column: str, value: str, what: str
) -> None:
    """A traceback would end a comparison with 1, which says SLOWER."""
    file = tmp_path / "edited.csv"
    frame = read(run).astype(object)
    frame.loc[1, column] = value
    frame.to_csv(file, index=False)
    with pytest.raises(StoreError, match=f"edited.csv, row 2: {what}"):
        read(file)
    assert main(["compare", str(file), str(run)]) == 2


def test_another_schema_version_is_refused_by_name(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "old.csv"
    frame = read(run)
    frame["schema_version"] = 7
    frame.to_csv(file, index=False)
    with pytest.raises(StoreError, match=r"old.csv: schema version 7, this harness reads \d"):
        read(file)
    import pyarrow.parquet as pq

    one = {"run_id": ["r"], "point_id": ["z"], "process": [0], "repeat": [0], "status": ["ok"]}
    table = to_arrow("points", one)
    (run / "points" / "z").mkdir()
    pq.write_table(table.replace_schema_metadata({"schema_version": "7"}),
                   run / "points" / "z" / "points.parquet")  # fmt: skip
    with pytest.raises(StoreError, match="schema version 7, this harness reads"):
        read(run)


def test_what_holds_nothing_says_so(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"no run folder \(it has no points/\) and no repeats.csv"):
        read(tmp_path)
    (tmp_path / "points").mkdir()
    with pytest.raises(StoreError, match="holds no point that has ended"):
        read(tmp_path)
