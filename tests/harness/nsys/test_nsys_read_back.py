"""An export read back into the tables of its run, without the processes of a real one."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from rich.console import Console

from harness.measuring import pass_plan
from harness.nsys.read_back import read_back
from harness.settings.config import SettingsError
from harness.settings.validation import validate
from harness.store import Results, load
from harness.sweep.point import measure_point
from tests.support import nsys_target
from tests.support.fake_backend import make_cfg, make_point
from tests.support.nsys_export import Export, session
from tests.support.plans import config

GRAPH = {"enforce_eager": False, "timing": "stamps", "device": "cuda"}


def measured(tmp_path: Path, **changes: Any) -> Path:
    """The folder of the profile of a point measured on imaginary GPUs."""
    model = {"name": "m", "path": str(nsys_target.write_model(tmp_path / "model")),
             "load_format": "dummy"}  # fmt: skip
    cfg = make_cfg(
        results_dir=str(tmp_path / "runs"), model=model, **GRAPH,
        instrument=["collectives", "nsys"], **changes,
    )  # fmt: skip
    backend = nsys_target.create()
    backend.start(cfg, None)
    point = make_point(cfg)
    run = tmp_path / "runs" / "run7"
    outcome = measure_point(backend, point, run / "points" / point.point_id)
    assert outcome.status == "ok", outcome
    plan = {"points": [{"point_id": point.point_id, "cfg": cfg}]}
    (run / "plan.json").write_text(json.dumps(plan))
    folder = run / "points" / f"{point.point_id}-nsys"
    folder.mkdir()
    return folder


def results(folder: Path) -> Results:
    return load(folder.parents[1])


def test_one_rank_has_kernels_and_gaps_and_no_collectives(tmp_path: Path, console: Console) -> None:
    folder = measured(tmp_path, tp=1)
    export = session(Export(), [("prefill", 2, [])] + [("replay", 2, [])] * 4, lambda *_: 0,
                     pids=[998])  # fmt: skip
    for step in range(5):
        begin = step * 1_000_000
        call = export.launch(998, begin + 20)
        for place in range(3):  # of 4 us, 10 us apart
            at = begin + 200_000 + 10_000 * place
            export.kernel("gemm", 998, 0, at, at + 4_000, call, None if step == 0 else 5 + place)
    export.write(folder / "report.sqlite")
    assert read_back(folder / "report.sqlite", console) == 0
    found = results(folder)
    assert len(found.kernels) == 15 and found.kernels["ordinal"].isna().all()
    assert "nsys" not in set(found.collectives["pass"])
    figures = found.metrics[found.metrics["pass"] == "nsys"]
    gap = figures[(figures["name"] == "launch_gap_us") & (figures["stat"] == "p50")]
    gap = gap[gap["phase"] == "decode"]
    assert gap["value"].tolist() == [12.0, 12.0]
    assert re.search(r"step/replay +4 +3 +24.0 +12.0 +0.0\n", printed(console))


def test_replays_of_a_size_that_no_other_pass_had_are_left_out(
    tmp_path: Path, console: Console
) -> None:
    """Arrivals over time make other batches in each pass."""
    folder = measured(tmp_path)
    path = folder.parent / "0123456789ab" / "steps.parquet"
    table = pq.read_table(path)
    frame = table.to_pandas()
    odd = frame[(frame["pass"] == "nsys") & (frame["phase"] == "decode")]["step"].max()
    frame.loc[(frame["pass"] == "nsys") & (frame["step"] == odd), "bucket"] = 8
    pq.write_table(table.from_pandas(frame, schema=table.schema, preserve_index=False), path)
    nsys_target.export().write(folder / "report.sqlite")
    assert read_back(folder / "report.sqlite", console) == 0
    rows = results(folder).collectives
    steps = sorted(set(rows[rows["pass"] == "nsys"]["step"]))
    assert len(steps) == 4 and odd not in steps
    assert "1 replays left out: no other pass of the run replayed a graph of 8 rows" in (
        " ".join(printed(console).split())
    )
    assert set(results(folder).kernels["step"].dropna()) == {*steps, odd}


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ("fewer", r"step 4 \(step/replay\) of rank 0: 6 communication kernels for 7 collectives"),
        ("bytes", r"an all_reduce of 512 bytes, the step's rows and the model's width make 256"),
        ("order", r"step 0 \(step/decode\) of rank 0: the run's table has step/prefill at this"),
    ],
)  # fmt: skip
def test_an_export_that_is_not_of_this_run(
    tmp_path: Path, console: Console, steps: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = measured(tmp_path)
    window = nsys_target.steps()
    what, batch, calls = window[0]
    if steps == "fewer":
        window[4] = ("replay", batch, window[4][2][:-1])
    elif steps == "bytes":
        window[0] = (what, batch, [(kind, site, 2 * size) for kind, site, size in calls])
    else:
        window[0] = ("decode", batch, calls)
    session(Export(), window, nsys_target.kernel_ns).write(folder / "report.sqlite")
    assert read_back(folder / "report.sqlite", console) == 1
    err = capsys.readouterr().err
    assert re.search(said, err), err
    assert not list(folder.glob("*.parquet"))


def test_a_rank_that_nsys_did_not_record_is_missed(
    tmp_path: Path, console: Console, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of two: its steps alone would look like those of one rank."""
    folder = measured(tmp_path)
    export = session(Export(), nsys_target.steps(), nsys_target.kernel_ns, pids=[998])
    export.write(folder / "report.sqlite")
    assert read_back(folder / "report.sqlite", console) == 1
    assert capsys.readouterr().err == (
        f"error: {folder}/report.sqlite: 1 of 2 ranks opened step ranges (process 998); nsys did "
        "not record the others\n"
    )
    assert not list(folder.glob("*.parquet"))


@pytest.mark.parametrize("steps", [4, 6, 30])
def test_a_capture_of_more_or_fewer_steps_than_its_pass_is_refused(
    tmp_path: Path, console: Console, steps: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The pass had five; a stop that came late would have let in the window before it."""
    folder = measured(tmp_path)
    window = nsys_target.steps()
    window = (window + window[1:] * 7)[:steps]
    session(Export(), window, nsys_target.kernel_ns).write(folder / "report.sqlite")
    assert read_back(folder / "report.sqlite", console) == 1
    assert capsys.readouterr().err == (
        f"error: rank 0: {steps} step ranges in the export, 5 steps in the run's table (pass "
        "nsys)\n"
    )


def test_a_folder_whose_point_the_plan_does_not_have(
    tmp_path: Path, console: Console, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = measured(tmp_path)
    other = folder.rename(folder.with_name("ffffffffffff-nsys"))
    nsys_target.export().write(other / "report.sqlite")
    assert read_back(other / "report.sqlite", console) == 1
    assert "has no point ffffffffffff" in capsys.readouterr().err


def test_the_pass_is_the_last_and_has_the_range_outside_of_all_else() -> None:
    effective = {"device": "cuda", "tp": 2, "mode": "graph"}
    cfg = {**config(timing="stamps"), "instrument": ["collectives", "nsys"]}
    passes, notes = pass_plan.plan(cfg, effective)
    assert [p.name for p in passes] == ["step", "graph_timed", "nsys"]
    assert list(passes[-1].factories) == ["capture", "nvtx"] and not passes[-1].warm
    assert notes == ["nsys was attached: times of the host hold what it costs"]
    passes, _ = pass_plan.plan(cfg, {**effective, "tp": 1})
    assert [p.name for p in passes] == ["step", "nsys"]
    cfg["timing"] = "host"
    passes, notes = pass_plan.plan(cfg, {"device": "cpu", "tp": 2, "mode": "eager"})
    assert [p.name for p in passes] == ["host"]
    assert notes == ["instrument nsys left out: it reads a GPU's kernels"]


def test_two_readers_of_cupti_are_refused() -> None:
    with pytest.raises(SettingsError, match="instrument.profiler=true: torch.profiler and nsys"):
        validate({**config(), "instrument": ["profiler", "nsys"]})


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=200)
