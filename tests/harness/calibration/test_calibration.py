"""Calibrations: the file that holds them, the processes that measure, and a live one on gloo."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.calibration import command, file, measure
from harness.calibration.crew import Crew
from harness.calibration.file import Calibration
from harness.calibration.parts import default_worlds, obstacle, sizes
from harness.calibration.tables import remarks, tables
from harness.machine import hardware
from harness.machine.capabilities import Machine
from tests.support.fake_nvml import install, reading
from tests.support.meters import BrokenMeter, ToldMeter

CPU = Machine(gpus=0, cores=2, cxx=None, packages={})


def figure(name: str, value: float) -> dict[str, Any]:
    return {"name": name, "value": value, "unit": "B/s", "n": 1, "source": "host", "how": "told"}


@pytest.fixture
def calibration(tmp_path: Path) -> Calibration:
    return Calibration(tmp_path / "hardware" / "0123.json")


def test_parts_are_kept_and_what_is_missing_is_named(calibration: Calibration) -> None:
    assert calibration.missing(["read", "copy"]) == ["read", "copy"] and calibration.parts == {}
    calibration.put("read", [figure("read_bytes_s", 4e12)], seconds=1.5)
    calibration.put("copy", status="error", reason="RuntimeError: out of luck")
    again = Calibration(calibration.path)
    assert again.missing(["read", "copy"]) == ["copy"]
    assert again.figure("read_bytes_s") == 4e12 and again.figure("copy_bytes_s") is None
    assert again.parts["copy"]["reason"] == "RuntimeError: out of luck"
    assert [p.name for p in calibration.path.parent.iterdir()] == ["0123.json"]
    found = json.loads(calibration.path.read_text())
    assert found["machine"]["fingerprint"] == hardware.fingerprint()


def test_a_part_says_how_the_machine_was_behind_it(
    calibration: Calibration, monkeypatch: pytest.MonkeyPatch, foreign_pid: int
) -> None:
    install(monkeypatch, reading(sm=1410, pids=[foreign_pid]), reading())
    calibration.put("read", [figure("read_bytes_s", 4e12)])
    state = calibration.parts["read"]["state"]
    assert (state["gpu0.sm_clock_mhz"], state["gpu1.sm_clock_mhz"]) == (1410.0, 1980.0)
    assert (state["gpu0.other_processes"], state["gpu1.other_processes"]) == (1.0, 0.0)
    assert remarks(calibration)[1:] == ["others computed on a GPU beside read"]
    install(monkeypatch, reading())
    calibration.put("read", [figure("read_bytes_s", 4e12)])
    assert remarks(calibration)[1:] == []


def test_a_failure_never_takes_the_place_of_a_measurement(calibration: Calibration) -> None:
    calibration.put("read", [figure("read_bytes_s", 4e12)])
    calibration.put("read", status="error", reason="worse luck")
    assert calibration.figure("read_bytes_s") == 4e12
    calibration.put("read", [figure("read_bytes_s", 5e12)])
    assert calibration.figure("read_bytes_s") == 5e12


def test_other_software_makes_a_part_missing(
    calibration: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibration.put("read", [figure("read_bytes_s", 4e12)])
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    assert calibration.missing(["read"]) == []
    monkeypatch.setenv("NCCL_PROTO", "LL")
    assert calibration.missing(["read"]) == ["read"]
    monkeypatch.delenv("NCCL_PROTO")
    monkeypatch.setattr(hardware, "versions", lambda: {"torch": "9", "triton": None, "nccl": None})
    assert calibration.missing(["read"]) == ["read"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"read_bytes_s": 1.0}', '{"version": 0}'])
def test_a_file_of_no_use_holds_nothing_and_is_written_anew(
    calibration: Calibration, text: str
) -> None:
    calibration.path.parent.mkdir()
    calibration.path.write_text(text)
    assert calibration.parts == {} and calibration.figure("read_bytes_s") is None
    calibration.put("read", [figure("read_bytes_s", 1.0)])
    assert calibration.figure("read_bytes_s") == 1.0


def test_ceilings_need_both_rates(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    calibration = Calibration(file.path_of(runs))
    assert calibration.path.parent == tmp_path / "hardware"
    calibration.put("read", [figure("read_bytes_s", 4e12)])
    assert file.ceilings(runs) is None
    calibration.put("matmul", [figure("matmul_flops_s", 7e14)])
    found = file.ceilings(runs)
    assert found is not None and (found.read_bytes_s, found.matmul_flops_s) == (4e12, 7e14)


def test_what_fails_costs_one_part_alone(calibration: Calibration) -> None:
    """A process that raised, died or hung is replaced; the others go on in the one they have."""
    names = ["fine:a", "fine:b", "raise:c", "fine:d", "kill:e", "hang:f", "fine:g"]
    ended: list[tuple[str, str | None]] = []
    begun: list[tuple[str, int]] = []
    measure.calibrate(
        calibration, names, CPU, lambda name, reason, seconds: ended.append((name, reason)),
        begins=lambda name: begun.append((name, len(ended))),
        crew_of=lambda name, device, part_s: Crew(1, None, device, ToldMeter, part_s=15.0),
    )  # fmt: skip
    assert ended == [
        ("fine:a", None), ("fine:b", None), ("raise:c", "ValueError: told to fail: c"),
        ("fine:d", None), ("kill:e", "the process of rank 0 ended with code -9 (SIGKILL)"),
        ("hang:f", "it took more than 15 s"), ("fine:g", None),
    ]  # fmt: skip
    assert begun == [(name, place) for place, name in enumerate(names)]
    parts = calibration.parts
    assert [parts[name]["status"] for name in names] == [
        "ok", "ok", "error", "ok", "error", "error", "ok"
    ]  # fmt: skip
    pids = [parts[name]["rows"][0]["value"] for name in ("fine:a", "fine:b", "fine:d", "fine:g")]
    assert pids[0] == pids[1] and len(set(pids)) == 3 and os.getpid() not in pids
    assert parts["fine:a"]["rows"][0]["device"] == "cpu"


def test_processes_that_do_not_start_fail_every_part_once() -> None:
    ended: list[Any] = []
    crew = Crew(1, None, "cpu", BrokenMeter)
    crew.measure(["a", "b"], lambda name, replies, reason, seconds: ended.append((name, reason)))
    assert ended == [("a", "RuntimeError: no such device"), ("b", "RuntimeError: no such device")]


def test_the_ceilings_of_a_run_are_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def calibrate(calibration: Any, names: Any, machine: Any, ended: Any, **how: Any) -> None:
        asked.append(names)
        calibration.put("read", [figure("read_bytes_s", 4e12)])
        if len(asked) == 1:
            ended("matmul", "RuntimeError: no", 0.1)
        else:
            calibration.put("matmul", [figure("matmul_flops_s", 7e14)])

    monkeypatch.setattr(measure, "calibrate", calibrate)
    cfg = {"results_dir": str(tmp_path / "runs")}
    assert measure.ensure(cfg) == "matmul: RuntimeError: no"
    assert measure.ensure(cfg) is None and measure.ensure(cfg) is None
    assert asked == [["read", "matmul"], ["matmul"]]


def test_what_a_machine_cannot_measure_has_a_reason() -> None:
    gpus = Machine(gpus=4, cores=2, cxx=None, packages={"triton": "3"})
    assert default_worlds(gpus) == [1, 2, 4] and default_worlds(CPU) == [1, 2]
    names = ("read", "stamps", "all_reduce/x/2/eager", "all_reduce/x/2/graph")
    assert [obstacle(name, gpus) for name in names] == [None] * 4
    found = [obstacle(name, CPU) for name in names]
    assert found[0] is found[2] is None and "CUDA device" in str(found[1]) + str(found[3])
    apart = replace(gpus, strangers=frozenset({(2, 3)}))
    over = [f"all_reduce/{path}/eager" for path in ("symm_mem/2", "symm_mem/4", "nccl/4")]
    assert [obstacle(name, gpus) for name in over] == [None] * 3
    assert [obstacle(name, apart) for name in over] == [
        None, "GPU 2 cannot reach the memory of GPU 3", None
    ]  # fmt: skip
    bare = Machine(gpus=4, cores=2, cxx=None, packages={})
    assert [obstacle(name, bare) is None for name in names] == [True, False, False, False]


def test_a_live_calibration_of_two_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Counts and bytes alone: how long anything takes is the machine's affair."""
    if Machine.probe().gpus:
        pytest.skip("of a machine without a GPU")
    arguments = ["--world", "2", "--results-dir", str(tmp_path / "runs")]
    assert command.main([*arguments, "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    lines = err.splitlines()
    assert lines[0] == "all_reduce/gloo/2/eager ..."
    assert re.fullmatch(r"all_reduce/gloo/2/eager: [0-9.]+ s", lines[1])
    calibration = Calibration(next((tmp_path / "hardware").glob("*.json")))
    assert found["parts"] == calibration.parts
    for kind in ("all_reduce", "gather", "broadcast"):
        part = found["parts"][f"{kind}/gloo/2/eager"]
        assert part["status"] == "ok"
        assert [(r["bytes"], r["dtype"]) for r in part["rows"]] == sizes(kind, "cpu")
        for row in part["rows"]:
            assert (row["kind"], row["path"], row["world"]) == (kind, "gloo", 2)
            assert (row["n"], row["n_starved"], row["source"]) == (96, 0, "host")
            assert row["transfer_us"] > 0 and row["reason"] is None
        graph = found["parts"][f"{kind}/gloo/2/graph"]
        assert (graph["status"], graph["rows"]) == ("skipped", [])
        assert graph["reason"] == "CUDA graphs need a CUDA device; none visible"
    assert command.main([*arguments, "--markdown"]) == 0  # everything is there: nothing is measured
    out, err = capsys.readouterr()
    assert "gloo" not in err and "| 512 B | tiny x1 |" in out
    kept, again = found["parts"], calibration.parts
    assert all(again[name] == part for name, part in kept.items() if part["status"] == "ok")
    titles = [title.partition(";")[0] for title, _, _ in tables(calibration)]
    assert titles == [
        "all_reduce, gloo, 2 ranks, float32", "gather, gloo, 2 ranks, float32",
        "broadcast, gloo, 2 ranks, int64", "not measured",
    ]  # fmt: skip


@pytest.mark.parametrize("world", ["0", "two", "", "3x", "1,", "-1"])
def test_a_world_that_is_no_number_of_ranks_is_refused(
    world: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main([f"--world={world}"]) == 2
    told = f"argument --world: {world}: give whole numbers above 0 separated by commas, as in 4,8"
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        (CPU, "calibrate: --world 64 needs 64 cores, 2 usable; give 2 at most"),
        (replace(CPU, gpus=4), "calibrate: --world 64 needs 64 GPUs, 4 visible; give 4 at most"),
    ],
)
def test_a_world_that_the_machine_has_no_room_for_is_refused_at_once(
    machine: Machine,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(Machine, "probe", lambda: machine)
    monkeypatch.setattr(command, "calibrate", None)
    assert command.main(["--world", "1,64", "--results-dir", str(tmp_path / "runs")]) == 2
    assert capsys.readouterr().err == f"{said}\n"
    assert not list(tmp_path.iterdir())
    assert default_worlds(replace(CPU, cores=1)) == [1]


def test_a_folder_that_cannot_be_written_is_told_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Machine, "probe", lambda: CPU)
    monkeypatch.setattr(command, "calibrate", None)
    monkeypatch.setattr(measure, "calibrate", None)
    (tmp_path / "file").touch()
    runs = tmp_path / "file" / "runs"
    said = (
        f"calibrations stand in {tmp_path}/file/hardware, beside the runs' folder, and it cannot "
        "be written (Not a directory); name another results folder"
    )
    assert command.main(["--results-dir", str(runs)]) == 2
    assert capsys.readouterr().err == f"calibrate: --results-dir {runs}: {said}\n"
    assert measure.ensure({"results_dir": str(runs)}) == said


def test_a_disk_that_fills_up_while_measuring_ends_calibrate_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(calibration: Calibration, *_: Any, **__: Any) -> None:
        calibration.path.mkdir()  # the file cannot take its place
        calibration.put("read", [figure("read_bytes_s", 4e12)])

    monkeypatch.setenv("RANGEFINDER_LOCKS", str(tmp_path / "locks"))
    monkeypatch.setattr(Machine, "probe", lambda: CPU)
    monkeypatch.setattr(command, "calibrate", full)
    path = file.path_of(tmp_path / "runs")
    assert command.main(["--results-dir", str(tmp_path / "runs")]) == 1
    assert capsys.readouterr().err == (
        f"calibrate: {path} cannot be written: Is a directory; once it can be, the same command "
        "continues this run\n"
    )
