"""What a researcher loads: tidy frames with units and axes, of a run, of many, of CSV files"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from harness.store import StoreError, load, units
from harness.tables import schema
from harness.tables.export import csv
from tests.support.made_runs import write_cell

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """results/runs with two runs, of which the second has a point of the first once more."""
    folder = tmp_path / "results" / "runs"
    for index, (tp, batch, rate) in enumerate([(1, 1, 100.0), (1, 8, 400.0), (2, 1, 150.0)]):
        write_cell(folder / "a", [[rate, rate + 10]], index=index, tp=tp, batch=batch)
    write_cell(folder / "b", [[101.0], [103.0]], index=0, tp=1, batch=1)
    (folder / "notes.txt").touch()
    return folder


def test_units_are_the_catalogues(runs: Path) -> None:
    assert units("collectives")["latency_us"] == "us"
    assert units("points")["wall_s"] == "s" and "tp" not in units("points")
    for name in schema.TABLES:
        frame = load(runs / "a").table(name)
        assert frame.attrs["units"] == units(name)
    narrow = load(runs / "a").table("steps", ["device_us", "mode"])
    assert narrow.attrs["units"] == {"device_us": "us"}
    with pytest.raises(KeyError, match="choose one of points"):
        units("point")


def test_figures_come_with_the_axes_of_their_point(runs: Path) -> None:
    frame = load(runs / "a").figures("output_tok_s", stat="mean")
    found = frame[["tp", "batch", "model", "status", "value", "unit"]].values.tolist()
    assert found == [
        [1, 1, "tiny", "ok", 105.0, "1/s"],
        [1, 8, "tiny", "ok", 405.0, "1/s"],
        [2, 1, "tiny", "ok", 155.0, "1/s"],
    ]
    assert frame.attrs["units"] == {"output_tok_s": "1/s"}
    single = load(runs / "a").figures("output_tok_s", stat="value", repeats=True)
    assert single["value"].tolist() == [100.0, 110.0, 400.0, 410.0, 150.0, 160.0]
    assert load(runs / "a").figures("output_tok_s", stat="value").empty
    with pytest.raises(KeyError, match="figure 'tok_s': choose among output_tok_s"):
        load(runs / "a").figures("tok_s")


def test_a_folder_of_runs_is_all_of_them(runs: Path) -> None:
    whole = load(runs)
    frame = whole.figures("output_tok_s", stat="mean")
    assert list(zip(frame["run_id"], frame["process"], frame["value"], strict=True)) == [
        ("a", 0, 105.0), ("a", 0, 405.0), ("a", 0, 155.0), ("b", 0, 101.0), ("b", 1, 103.0),
    ]  # fmt: skip
    rows = whole.summary
    assert rows[["run_id", "tp", "batch", "output_tok_s"]].values.tolist() == [
        ["a", 1, 1, 105.0], ["a", 1, 8, 405.0], ["a", 2, 1, 155.0], ["b", 1, 1, 102.0],
    ]  # fmt: skip
    assert rows.attrs["units"]["step_p50_us"] == "us"
    assert len(whole.points) == 2 * 3 + 2


def test_published_csv_is_read_as_the_summary_it_is(runs: Path, tmp_path: Path) -> None:
    from harness.judging import repeats

    published = tmp_path / "published"
    published.mkdir()
    (published / "decode.csv").write_text(csv(runs / "a"))
    (published / "repeats.csv").write_text(repeats.csv(runs / "a"))
    rows = load(published).summary
    assert rows[["file", "tp", "output_tok_s"]].values.tolist() == [
        ["decode.csv", 1, 105.0], ["decode.csv", 1, 405.0], ["decode.csv", 2, 155.0],
    ]  # fmt: skip
    with pytest.raises(StoreError, match="holds no run: neither it nor a folder in it has points/"):
        _ = load(published).metrics
    with pytest.raises(StoreError, match="holds no run and no CSV of one"):
        _ = load(tmp_path / "results" / "runs" / "a" / "points").summary


def test_what_is_published_here_can_be_loaded() -> None:
    folders = {file.parent for file in (ROOT / "results" / "published").glob("*/*.csv")}
    assert folders
    for folder in folders:
        rows = load(folder).summary
        assert (rows["output_tok_s"].dropna() > 0).all() and len(rows) > 0


def drawn(page: str) -> dict[str, dict[int, float]]:
    """label -> {batch: value} of the lines that the page's snippet draws."""
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    (snippet,) = [block for block in blocks if "harness.store" in block]
    names: dict[str, object] = {}
    exec(snippet, names)
    lines = matplotlib.pyplot.gca().get_lines()
    found = {
        line.get_label(): dict(zip(line.get_xdata(), line.get_ydata(), strict=True))
        for line in lines
    }
    matplotlib.pyplot.close("all")
    return found


def test_the_readmes_snippet_draws_a_line_a_mode_of_each_published_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The values are those of the README's own table."""
    monkeypatch.chdir(ROOT)
    lines = drawn("README.md")
    assert len(lines) == 19
    two = {batch: round(rate) for batch, rate in lines["(qwen3-8b, 128.0, False, off, 2)"].items()}
    assert two == {1: 285, 8: 2156, 32: 7188, 128: 19327, 256: 25235}
    assert round(lines["(qwen3-8b, 128.0, False, off, 1)"][256]) == 16710


@pytest.mark.parametrize("page", ["README.md", "results/README.md"])
def test_the_documents_snippets_keep_modes_apart(
    page: str, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runs / "RUN"
    rates = [(True, "off", 100.0), (False, "off", 400.0), (False, "model", 500.0)]
    for index, (eager, compiled, rate) in enumerate(rates):
        write_cell(run, [[rate]], index=index, tp=1, enforce_eager=eager, compile=compiled)
    write_cell(run, [[7.0]], index=9, tp=1, workload__kind="nano_vllm")
    published = runs.parent / "published" / "qwen3-h200x2-2026-11"
    published.mkdir(parents=True)
    (published / "decode.csv").write_text(csv(run))
    monkeypatch.chdir(runs.parents[1])
    output = "5.0" if page == "README.md" else "5"  # a column with a gap, as a CSV has it
    assert drawn(page) == {
        f"(tiny, {output}, {eager}, {compiled}, 1)": {2: rate} for eager, compiled, rate in rates
    }
