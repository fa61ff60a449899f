"""Calibrations of real GPUs: behind a backlog and in a graph a collective takes as long."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from harness.calibration.file import OK, Calibration, Part
from harness.calibration.measure import calibrate
from harness.calibration.parts import DEVICE_PARTS, fused_shapes, plan, sizes
from harness.machine.capabilities import Machine
from harness.machine.nvml import Sampler
from harness.machine.telemetry import read

pytestmark = pytest.mark.gpu


def test_one_gpu(tmp_path: Path) -> None:
    calibration = Calibration(tmp_path / "one.json")
    calibrate(calibration, DEVICE_PARTS, Machine.probe())
    parts = calibration.parts
    assert {name: p["reason"] for name, p in parts.items() if p["status"] != OK} == {}

    def figure(name: str) -> float:
        found = calibration.figure(name)
        assert found is not None, name
        return found

    # A copy counts both directions, so that it is as fast as reading alone to within a half.
    assert 0.5 < figure("copy_bytes_s") / figure("read_bytes_s") < 1.5
    assert figure("matmul_flops_s") > 10 * figure("read_bytes_s")
    assert figure("graph_node_us") < figure("launch_us")
    assert 0 < figure("stamps_graph_floor_us") < figure("events_graph_floor_us")
    assert figure("stamps_tick_us") >= 0.001


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_collectives_of_two_gpus(tmp_path: Path) -> None:
    calibration = Calibration(tmp_path / "two.json")
    names = plan(Machine.probe(), [2])
    calibrate(calibration, names, Machine.probe())
    parts = calibration.parts
    assert {name: p["reason"] for name, p in parts.items() if p["status"] != OK} == {}
    eager, graph = (
        {row["bytes"]: row for row in parts[f"all_reduce/nccl/2/{mode}"]["rows"]}
        for mode in ("eager", "graph")
    )
    assert [(size, "bfloat16") for size in graph] == sizes("all_reduce", "cuda")
    for size, row in graph.items():
        assert row["n"] == 1024 and row["source"] == "stamps"
        assert eager[size]["n"] >= 64, eager[size]["reason"]
        # Behind a backlog the host's launches are no part of a time, as in a graph.
        limit = max(4.0, 0.3 * row["transfer_us"])
        assert eager[size]["transfer_us"] == pytest.approx(row["transfer_us"], abs=limit)
        assert row["wait_us"] <= max(2.0, 0.1 * row["transfer_us"])  # ranks begin together
    assert graph[64 << 20]["transfer_us"] > 4 * graph[2 << 10]["transfer_us"]
    check_fused_sums(parts)


def check_fused_sums(parts: dict[str, Part]) -> None:
    """The curve of symm_fused, whose kernel adds and norms behind the sum."""
    eager, graph, plain = (
        {row["bytes"]: row for row in parts[f"all_reduce/{name}"]["rows"]}
        for name in ("symm_fused/2/eager", "symm_fused/2/graph", "symm_mem/2/graph")
    )
    shapes = fused_shapes(2, "cuda")
    assert [(row["rows"], size) for size, row in graph.items()] == [
        (rows, rows * hidden * 2) for rows, hidden in shapes
    ]
    for size, row in graph.items():
        assert row["n"] == 1024 and row["source"] == "stamps" and "norm" in row["holds"]
        assert eager[size]["n"] >= 64, eager[size]["reason"]
        limit = max(4.0, 0.3 * row["transfer_us"])
        assert eager[size]["transfer_us"] == pytest.approx(row["transfer_us"], abs=limit)
        assert row["wait_us"] <= max(2.0, 0.1 * row["transfer_us"])
        assert row["transfer_us"] > 0
        if row["mark"] is not None:  # a sum with its copy, without what is behind it
            assert row["transfer_us"] < 3 * plain[size]["transfer_us"] + 4.0
    assert graph[8 << 20]["transfer_us"] > 2 * graph[2 << 10]["transfer_us"]


def test_a_gpu_is_sampled() -> None:
    rows = {row["name"]: row for row in read("before") if row["device"] == "gpu0"}
    assert {name: r["reason"] for name, r in rows.items() if r["value"] is None} == {}
    x = torch.zeros(8, device="cuda")
    with Sampler() as sampler:
        begin = time.perf_counter()
        # Beside other processes NVML's start alone may take longer than half a second.
        while len(sampler._samples) < 4 and time.perf_counter() < begin + 60:
            x.add_(1)
            torch.cuda.synchronize()
    *samples, cost = sampler.rows(begin)
    clocks = [r["value"] for r in samples if r["name"] == "sm_clock_mhz" and r["device"] == "gpu0"]
    assert len(clocks) >= 4 and min(clocks) > 0
    assert cost["value"] > 0
    after = {row["name"]: row for row in read("after") if row["device"] == "gpu0"}
    assert after["energy_j"]["value"] > rows["energy_j"]["value"]
