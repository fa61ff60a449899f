"""`python -m harness predict` over run folders that are written by hand."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from harness.calibration.file import Calibration
from harness.prediction.cells import measured, shape_of
from harness.prediction.command import _rows_tables, main
from harness.prediction.model import Cell, PredictionError, parts_of
from harness.tables.point_files import write_point
from tests.support.fake_backend import make_cfg
from tests.support.predictions import CEILINGS, SETTINGS, TRUE, calibrated_rows

MACHINE = "0123456789ab"


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANGEFINDER_CACHE", str(tmp_path / "models"))


def section(model: str) -> dict[str, Any]:
    return {"name": model, "path": None, "load_format": "dummy"}


def environment(gpus: int = 2, **changes: Any) -> str:
    """Of the machine, with so many of its GPUs visible."""
    gpu = {"name": "a GPU", "memory_bytes": 80 << 30, "capability": "9.0", "driver": "1"}
    found = {"host": "here", "cpu": "a CPU", "memory_bytes": 1 << 40, "os": "Linux", "driver": "1",
             "gpus": [{"index": n, **gpu, **changes} for n in range(gpus)]}  # fmt: skip
    return json.dumps(found)


def write(run: Path, number: int, model: str, tp: int, batch: int, **changes: Any) -> None:
    """A point whose decode steps took what the model says; `changes` of the table of points, or
    step_us."""
    from harness.calibration.curves import Curves

    cfg = make_cfg(tp=tp, batch=batch, workload__prompt_tokens=128, workload__output_tokens=128)
    cfg["model"] = section(model)
    work = changes.pop("workload", None)
    cfg["workload"]["kind"] = work or "decode"
    cfg["instrument"] = changes.pop("instrument", cfg["instrument"])
    cell = Cell(model, shape_of(cfg["model"]), tp, batch, 128, 128, "bfloat16",
                "nccl" if tp > 1 else None, True)  # fmt: skip
    curves = Curves(calibrated_rows())
    step_us = changes.pop("step_us", TRUE.step_us(parts_of(cell, CEILINGS, curves)))
    point_id = f"{number:012x}"
    key = {"run_id": run.name, "point_id": point_id, "process": 0}
    point = {**key, "repeat": 0, "status": "ok", "requested": json.dumps(cfg), "tp": tp,
             "batch": batch, "effective": json.dumps(SETTINGS), "effective.mode": "graph",
             "effective.comm": "nccl" if tp > 1 else "solo", "hardware_fingerprint": MACHINE,
             "environment": environment(), **changes}  # fmt: skip
    figure = {**key, "name": "step_us", "stat": "p50", "value": step_us, "unit": "us", "n": 5,
              "n_process": 1, "source": "stamps", "pass": "step", "phase": "decode",
              "ranks": "max"}  # fmt: skip
    tables = {name: {k: [v] for k, v in row.items()}
              for name, row in (("points", point), ("metrics", figure))}  # fmt: skip
    write_point(run / "points" / point_id, tables)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two models, one and two ranks, three batches."""
    run = tmp_path / "results" / "runs" / "run"
    cells = [(model, tp, batch) for model in ("qwen3-0.6b", "qwen3-8b") for tp in (1, 2)
             for batch in (1, 32, 256)]  # fmt: skip
    for number, cell in enumerate(cells):
        write(run, number, *cell)
    return run


@pytest.fixture
def calibrated(tmp_path: Path) -> Calibration:
    found = Calibration(tmp_path / "results" / "hardware" / f"{MACHINE}.json")
    found.put("read", [{"name": "read_bytes_s", "value": CEILINGS.read_bytes_s}])
    found.put("matmul", [{"name": "matmul_flops_s", "value": CEILINGS.matmul_flops_s}])
    found.put("all_reduce/nccl/2/graph", calibrated_rows())
    return found


def test_predicted_rows_of_a_run(
    run: Path, calibrated: Calibration, capsys: pytest.CaptureFixture[str]
) -> None:
    from harness.calibration.curves import Curves

    assert main([str(run), "--tp", "4,3", "--model", "qwen3-32b", "--csv"]) == 0
    frame = pd.read_csv(io.StringIO(capsys.readouterr().out))
    assert frame["status"].value_counts().to_dict() == {"ok": 12, "predicted": 15, "skipped": 9}
    row = frame[(frame["model"] == "qwen3-32b") & (frame["tp"] == 4) & (frame["batch"] == 32)]
    cell = Cell("qwen3-32b", shape_of(section("qwen3-32b")), 4, 32, 128, 128, "bfloat16", "nccl",
                True)  # fmt: skip
    wanted = TRUE.step_us(parts_of(cell, CEILINGS, Curves(calibrated_rows())))
    assert row["predicted_us"].tolist() == [pytest.approx(wanted)]
    assert set(frame[frame["status"] == "skipped"]["tp"]) == {3}
    assert frame[frame["status"] == "ok"]["measured_us"].notna().all()


def test_the_printed_tables(
    run: Path, calibrated: Calibration, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run), "--tp", "4"]) == 0
    out = capsys.readouterr().out
    assert "Fit: cuda, CUDA graphs, compile=model, attention=flash2" in out
    assert "   12             0.80               0.62        40.0           0.0        0.0" in out
    assert main([str(run), "--tp", "4", "--markdown"]) == 0
    lines = capsys.readouterr().out.splitlines()
    start = "| predicted | qwen3-8b | 4 | 256 | nccl | false | model |"
    assert sum(line.startswith(start) for line in lines) == 1
    assert any("| tp | 2 | 6 | 0.0 | 0.0 |" in line for line in lines)


def test_lengths_that_differ_are_columns() -> None:
    """Rows of 128 and of 2,048 prompt tokens looked alike but for their times."""
    times = ("predicted_us", "read_us", "matmul_us", "layers_us", "comm_us")
    row = {"status": "predicted", "model": "m", "tp": 4, "batch": 1, "comm": "nccl", "reason": None,
           "enforce_eager": False, "compile": "off", "output_tokens": 64, "comm_share": None,
           "expected_error": None, **dict.fromkeys(times)}  # fmt: skip
    ((_, headings, lines),) = _rows_tables([{**row, "prompt_tokens": n} for n in (128, 2048)])
    assert "output tokens" not in headings
    assert [line[headings.index("prompt tokens")] for line in lines] == ["128", "2048"]
    ((_, headings, _),) = _rows_tables([{**row, "prompt_tokens": 128}])
    assert headings[:5] == ["status", "model", "tp", "batch", "comm"]


def test_without_anything_to_predict_it_says_what_to_give(
    run: Path, calibrated: Calibration, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in ([], ["--tp", "2"], ["--markdown"], ["--csv"]):
        assert main([str(run), *words]) == 1
        out, err = capsys.readouterr()
        assert err == (
            "predict: every cell asked for is measured, so nothing is predicted; say what the runs "
            "do not hold by --tp, --batch or --model, as in --tp 8\n"
        )
        assert "Predicted" not in out and ("Fit: " in out) == (words != ["--csv"])


@pytest.mark.parametrize("text", ["x", "4,,8", "0", "-1", "2.5", ""])
def test_what_is_no_list_of_numbers_is_told_so(
    text: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for flag in ("--tp", "--batch"):
        assert main([str(run), f"{flag}={text}"]) == 2
        err = capsys.readouterr().err
        told = f"argument {flag}: {text}: give whole numbers above 0 separated by commas, as in 4,8"
        assert told in err and "_numbers" not in err


def test_points_that_are_no_cells_are_counted(run: Path) -> None:
    write(run, 90, "qwen3-8b", 2, 8, status="error", reason="it failed")
    write(run, 91, "qwen3-8b", 2, 8, workload="trace")
    write(run, 92, "qwen3-8b", 2, 8, step_us=None)
    write(run, 93, "qwen3-8b", 2, 8, instrument=["collectives", "nsys"])
    found = measured([run])
    assert [len(group.cells) for group in found.groups] == [12]
    assert found.fingerprint == MACHINE
    assert sorted(found.notes) == [
        "1 points left out: it ran under nsys, whose times hold what that costs",
        "1 points left out: no time of a clean decode step (instrument collectives gives it)",
        "1 points left out: status error",
        "1 points left out: workload=trace: the lengths of its steps vary",
    ]
    assert [len(g.cells) for g in measured([run, run]).groups] == [12]  # a run named twice


def test_a_path_that_is_not_calibrated_costs_its_own_cells_alone(
    run: Path, calibrated: Calibration, capsys: pytest.CaptureFixture[str]
) -> None:
    """Compiled code sums as by symm_mem, where nothing is compiled the layers' sums are fused."""
    plain = json.dumps({**SETTINGS, "compile": "off"})
    fused = {"effective.comm": "symm_fused"}
    write(run, 90, "qwen3-8b", 2, 32, **fused)
    write(run, 91, "qwen3-8b", 2, 32, effective=plain, **fused)
    assert [[c.compiled for c in g.cells] for g in measured([run]).groups] == [[True] * 13, [False]]
    assert main([str(run), "--tp", "4", "--csv"]) == 0
    frame = pd.read_csv(io.StringIO(capsys.readouterr().out))
    compiled = frame[frame["compile"] == "model"]
    assert compiled[compiled["status"] == "ok"]["comm"].value_counts().to_dict() == {
        "solo": 6, "nccl": 6
    }  # fmt: skip
    assert set(compiled[compiled["status"] == "predicted"]["comm"]) == {"nccl"}
    skipped = compiled[compiled["status"] == "skipped"]
    assert set(skipped["comm"]) == {"symm_fused"} and len(skipped) == 12
    assert skipped["reason"].str.contains("no graph all_reduce over symm_mem is calibrated").all()
    assert skipped["measured_us"].notna().sum() == 1
    assert main([str(run), "--tp", "4", "--markdown"]) == 0
    out = capsys.readouterr().out
    assert "1 cells left out of the fit: no graph all_reduce over symm_mem is calibrated" in out
    assert "3 terms need at least as many; 1 cells left out of the fit: no graph all_reduce" in out


def test_other_modes_are_other_groups(run: Path) -> None:
    eager = json.dumps({**SETTINGS, "enforce_eager": True})
    write(run, 90, "qwen3-8b", 2, 8, effective=eager, **{"effective.mode": "compiled-model"})
    groups = measured([run]).groups
    assert [(len(g.cells), g.cells[0].graph) for g in groups] == [(12, True), (1, False)]


def test_runs_of_two_machines_are_refused(run: Path) -> None:
    other = {"hardware_fingerprint": "other", "environment": environment(name="another GPU")}
    write(run, 90, "qwen3-8b", 2, 8, **other)
    with pytest.raises(PredictionError, match="runs of 2 machines"):
        measured([run])


def test_runs_that_saw_a_part_of_the_gpus_are_of_the_same_machine(
    run: Path, calibrated: Calibration
) -> None:
    """Its calibration is that of all of them."""
    seen = {"hardware_fingerprint": "fewer", "environment": environment(gpus=1)}
    write(run, 0, "qwen3-0.6b", 1, 1, **seen)
    found = measured([run])
    assert found.fingerprint == MACHINE and [len(group.cells) for group in found.groups] == [12]
    assert main([str(run), "--tp", "4"]) == 0


def test_a_point_whose_job_died_says_nothing_of_the_machine(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its row has the machine's fingerprint and nothing else of it (fanout/command.py)."""
    died = {"status": "error", "environment": json.dumps({"fingerprint": "unseen"})}
    write(run, 0, "qwen3-0.6b", 1, 1, hardware_fingerprint="unseen", **died)
    found = measured([run])
    assert found.fingerprint == MACHINE and found.notes == ("1 points left out: status error",)
    for number in range(12):
        write(run, number, "qwen3-0.6b", 1, 1, **died)
    assert main([str(run), "--tp", "4"]) == 1
    said = "no decode step to fit; 12 points left out: status error"
    assert said in capsys.readouterr().err


def test_hosts_of_other_names_are_one_machine_where_their_fingerprint_is(run: Path) -> None:
    """Containers have names of their own, and a kernel leaves a little more or less memory."""
    facts = json.loads(environment(gpus=1))
    facts |= {"host": "container", "memory_bytes": facts["memory_bytes"] - (1 << 20)}
    seen = {"hardware_fingerprint": "fewer", "environment": json.dumps(facts)}
    write(run, 0, "qwen3-0.6b", 1, 1, **seen)
    assert measured([run]).fingerprint == MACHINE
    other = {"hardware_fingerprint": "other", "environment": json.dumps({**facts, "cpu_cores": 8})}
    write(run, 1, "qwen3-0.6b", 1, 1, **other)
    with pytest.raises(PredictionError, match="runs of 2 machines"):
        measured([run])


def test_what_is_missing_is_said(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run), "--tp", "4"]) == 1
    assert "python -m harness calibrate" in capsys.readouterr().err
    assert main([str(tmp_path / "none"), "--tp", "4"]) == 2
    assert "no such run folder" in capsys.readouterr().err
    assert main([str(run), "--tp", "none"]) == 2
    assert main([]) == 2


def test_nothing_to_predict_is_a_failure(
    run: Path, calibrated: Calibration, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run), "--batch", "512"]) == 1
    assert "batch=512: measured are 1 to 256" in capsys.readouterr().out
    assert main([str(run), "--model", "qwen9"]) == 1
    assert "qwen9" in capsys.readouterr().err
