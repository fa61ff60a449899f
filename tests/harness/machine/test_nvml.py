"""Readings of imaginary GPUs, and what a window's samples say, worked out by hand."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.machine import hardware
from harness.machine.nvml import Gpus, Sampler, session_of, strangers, used_bytes
from harness.machine.telemetry import read
from harness.measuring import gpu_state, window
from harness.measuring.window import Window
from harness.rows.figures import FigureRows
from harness.rows.metrics import energy_figure
from tests.support.fake_nvml import FakeNvml, install, reading

ALL = ["sm_clock_mhz", "memory_clock_mhz", "power_w", "temperature_c", "throttle_reasons",
       "energy_j", "own_processes", "other_processes"]  # fmt: skip


def test_every_reading_has_its_unit(monkeypatch: pytest.MonkeyPatch, foreign_pid: int) -> None:
    mine = os.getpid()
    pids = [mine, foreign_pid, 2**22 + 5]
    nvml = install(monkeypatch, reading(bits=0x24, pids=pids), reading(mw=71_500))
    with Gpus() as gpus:
        rows = gpus.read("before")
    assert nvml.opened == 0
    first = {r["name"]: (r["value"], r["unit"]) for r in rows if r["device"] == "gpu0"}
    assert list(first) == ALL and first == {
        "sm_clock_mhz": (1980.0, "MHz"), "memory_clock_mhz": (3201.0, "MHz"),
        "power_w": (300.0, "W"), "temperature_c": (40.0, "C"), "throttle_reasons": (36.0, "bits"),
        "energy_j": (5.0, "J"), "own_processes": (1.0, "1"), "other_processes": (2.0, "1"),
    }  # fmt: skip
    second = {r["name"]: r["value"] for r in rows if r["device"] == "gpu1"}
    assert second["power_w"] == 71.5 and second["own_processes"] == 0.0
    assert session_of(mine) == os.getsid(0) and session_of(2**22 + 5) is None


def test_a_reading_that_fails_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, reading(mj=FakeNvml.NVMLError("Not Supported"), pids=[os.getpid()]))
    rows = {r["name"]: r for r in read("after") if r["device"] == "gpu0"}
    assert (rows["energy_j"]["value"], rows["energy_j"]["reason"]) == (None, "Not Supported")
    assert rows["power_w"]["value"] == 300.0 and rows["power_w"]["reason"] is None


def test_gpus_are_read_right_beside_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, reading())
    before, after = ([r["device"] for r in read(when)] for when in ("before", "after"))
    assert before[-1] == "gpu0" and before[0] == "cpu"
    assert after[0] == "gpu0" and after[-1] == "cpu"


def test_memory_in_use_is_read_of_an_engines_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = install(monkeypatch, reading(used=5), reading(used=FakeNvml.NVMLError("lost")))
    assert used_bytes(1) == [5] and used_bytes(2) == [5, None] and used_bytes(3) == [5, None, None]
    assert nvml.opened == 0


def test_gpus_that_cannot_read_each_others_memory_are_named_where_nvml_can_tell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nvml = install(monkeypatch, reading(p2p=[0, 0, 5]), reading(p2p=[3, 0, 6]),
                   reading(p2p=FakeNvml.NVMLError("Not Supported")))  # fmt: skip
    assert strangers() == {(0, 2), (1, 0)}
    # CUDA counts the GPUs that it sees, whatever NVML calls them.
    monkeypatch.setattr(hardware, "gpus", lambda: ({"index": 2}, {"index": 1}, {"index": 0}))
    assert strangers() == {(2, 0), (1, 2)}
    monkeypatch.setattr(hardware, "gpus", tuple)
    assert strangers() == frozenset() and nvml.opened == 0


def test_a_sampler_reads_while_it_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = install(monkeypatch, reading(), reading(sm=1410))
    with Sampler(period_s=0.002) as sampler:
        begin = time.perf_counter()
        while nvml.reads < 3 * 8:
            time.sleep(0.001)
        end = time.perf_counter()
    reads = nvml.reads
    rows = sampler.rows(begin)
    *samples, cost = rows
    assert nvml.opened == 0 and len(samples) == reads
    assert [r["name"] for r in samples[:4]] == [
        "sm_clock_mhz", "power_w", "temperature_c", "throttle_reasons"
    ]  # fmt: skip
    assert {(r["device"], r["value"]) for r in samples if r["name"] == "sm_clock_mhz"} == {
        ("gpu0", 1980.0), ("gpu1", 1410.0)
    }  # fmt: skip
    instants = sorted({r["at_s"] for r in samples})
    assert len(instants) == reads // 8 and instants[-1] <= end - begin + 1
    assert (cost["device"], cost["name"], cost["unit"]) == ("cpu", "sampler_cpu_s", "s")
    assert cost["value"] > 0
    time.sleep(0.01)
    assert nvml.reads == reads


def test_a_sampler_that_fails_says_so_and_harms_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = install(monkeypatch, reading())
    monkeypatch.setattr(nvml, "nvmlInit", lambda: 1 / 0)
    with Sampler() as sampler:
        pass
    [cost] = sampler.rows(0.0)
    assert cost["value"] is None and cost["reason"] == "ZeroDivisionError: division by zero"


def test_without_gpus_nothing_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    with Sampler() as sampler:
        pass
    assert sampler.rows(0.0) == [] and {r["device"] for r in read("before")} == {"cpu"}


# -- what the samples of a window say -------------------------------------------------------------

TOKENS = 100


class Output:
    token_ids = [1] * TOKENS


def made(samples: dict[str, list[tuple[float, dict[str, Any]]]], wall_s: float = 4.0,
         around: dict[str, list[dict[str, Any]]] | None = None) -> Window:  # fmt: skip
    """A window with these samples by GPU, and readings before and after it."""
    rows = [
        {"when": "during", "device": device, "at_s": at, "name": name, "value": value,
         "reason": None if value is not None else "Not Supported"}
        for device, readings in samples.items()
        for at, values in readings
        for name, value in values.items()
    ]  # fmt: skip
    for device, readings in (around or {}).items():
        for when, values in zip(("before", "after"), readings, strict=True):
            rows += [{"when": when, "device": device, "name": name, "value": value,
                      "reason": None} for name, value in values.items()]  # fmt: skip
    steps = [np.zeros(0)] * 2
    return Window("plain", 0, [Output()], (TOKENS,), steps, 10.0, 10.0 + wall_s,
                  datetime.now(UTC), {}, rows)  # type: ignore[list-item]  # fmt: skip


def power(*pairs: tuple[float, float | None]) -> list[tuple[float, dict[str, Any]]]:
    return [(at, {"power_w": watts}) for at, watts in pairs]


def test_power_is_integrated_by_trapezoids_over_all_gpus() -> None:
    """gpu0: 100 W held to 1 s, to 300 W at 3 s, held to 4 s: 100 + 400 + 300 J. gpu1: 50 W x 4 s.
    The sample after the end counts nowhere, nor does a GPU of others."""
    one = made({"gpu0": power((1.0, 100.0), (3.0, 300.0), (4.5, 9e9)),
                "gpu1": power((2.0, 50.0)), "gpu2": power((2.0, 700.0))})  # fmt: skip
    assert gpu_state.energy_j(one, ["gpu0", "gpu1"]) == (1000.0, "nvml_power", None)
    rows = FigureRows({})
    second = replace(made({"gpu0": power((1.0, 50.0))}), repeat=1)
    energy_figure(rows, [one, second], ["gpu0"])
    values = {(r["stat"], r.get("repeat")): r["value"] for r in rows.rows}
    assert (values["value", 0], values["value", 1]) == (8.0, 2.0)  # 800 and 200 J, 100 tokens
    assert values["mean", None] == 5.0


def test_energy_counters_go_before_the_integral() -> None:
    around = {"gpu0": [{"energy_j": 1000.0}, {"energy_j": 1900.0}],
              "gpu1": [{"energy_j": 5.0}, {"energy_j": 205.0}]}  # fmt: skip
    samples = {"gpu0": power((1.0, 1.0)), "gpu1": power((1.0, 1.0))}
    counted = gpu_state.energy_j(made(samples, around=around), ["gpu0", "gpu1"])
    assert counted == (1100.0, "nvml_energy", None)
    around["gpu1"][1]["energy_j"] = None  # one board has no counter: all by their power
    mixed = gpu_state.energy_j(made(samples, around=around), ["gpu0", "gpu1"])
    assert mixed == (8.0, "nvml_power", None)


@pytest.mark.parametrize(
    ("devices", "wall_s", "reason"),
    [
        ([], 4.0, "no GPU whose power can be read"),
        (["gpu0"], 1.9, "the window took 1.90 s; power is averaged, 2 s needed"),
        (["gpu0"], 4.0, "neither energy nor power can be read: Not Supported"),
        (["gpu1"], 4.0, "neither energy nor power can be read: no sample was taken"),
    ],
)
def test_no_energy_has_a_reason(devices: list[str], wall_s: float, reason: str) -> None:
    one = made({"gpu0": power((1.0, None))}, wall_s)
    joules, _, why = gpu_state.energy_j(one, devices)
    assert joules is None and why == reason
    rows = FigureRows({})
    energy_figure(rows, [one], devices)
    assert {(r["value"], r["reason"]) for r in rows.rows} == {(None, reason)}


def test_a_throttled_repeat_is_marked() -> None:
    """Four samples; gpu0 is held by the power cap in two of them and by heat in one of these, gpu1
    is idle, which limits nothing."""

    def sample(at: float, mhz: float, bits: int, c: float) -> tuple[float, dict[str, Any]]:
        return at, {"sm_clock_mhz": mhz, "power_w": 600.0, "temperature_c": c,
                    "throttle_reasons": float(bits)}  # fmt: skip

    hot = [sample(0, 1980, 0, 60), sample(1, 1500, 0x4, 80), sample(2, 1500, 0x24, 81),
           sample(3, 1980, 0x2, 70)]  # fmt: skip
    cool = [sample(at, 1900, 0x1, 30) for at in range(4)]
    one = made({"gpu0": hot, "gpu1": cool})
    assert gpu_state.columns(one, ["gpu0", "gpu1"]) == {
        "sm_clock_mhz": 1740.0, "power_w": 1200.0, "temperature_c": 81.0, "throttled": 0.5,
        "throttle_reasons": "sw_power_cap, sw_thermal_slowdown", "gpu_others": None,
    }  # fmt: skip
    noted = gpu_state.notes([one, made({"gpu0": cool})], ["gpu0", "gpu1"])
    assert noted[:2] == [
        "throttled: sw_power_cap on gpu0 in 25% of the samples",
        "throttled: sw_thermal_slowdown on gpu0 in 12% of the samples",
    ]
    untouched = gpu_state.columns(one, ["gpu1"])
    assert (untouched["throttled"], untouched["throttle_reasons"]) == (0.0, None)
    assert set(gpu_state.columns(one, []).values()) == {None}
    assert gpu_state.notes([one], []) == []


def test_other_processes_are_counted_where_ones_own_are_seen() -> None:
    def around(*counts: tuple[int, int]) -> dict[str, list[dict[str, Any]]]:
        return {"gpu0": [{"own_processes": own, "other_processes": others}
                         for own, others in counts]}  # fmt: skip

    alone, visited, unseen = (
        made({}, around=around(*counts))
        for counts in (((1, 0), (1, 0)), ((1, 0), (1, 2)), ((0, 1), (0, 1)))
    )
    assert [gpu_state.others(w, ["gpu0"]) for w in (alone, visited, unseen)] == [0, 2, None]
    assert gpu_state.notes([alone], ["gpu0"]) == []
    assert gpu_state.notes([alone, visited], ["gpu0"]) == [
        "shared GPU: 2 other compute processes beside the engine on one of them"
    ]
    [said] = gpu_state.notes([unseen], ["gpu0"])
    assert said.startswith("whether others computed on the GPUs cannot be told")


def test_an_engines_gpus_are_the_first_visible_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, reading(), reading(), reading())
    assert gpu_state.of_engine({"device": "cuda", "tp": 2}) == ["gpu0", "gpu1"]
    assert gpu_state.of_engine({"device": "cpu", "tp": 2}) == []


def test_a_point_has_the_columns_and_the_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, foreign_pid: int
) -> None:
    from harness.store import load
    from harness.sweep.point import measure_point
    from harness.tables.report import summary, view
    from tests.support.fake_backend import make_cfg, make_point
    from tests.support.fake_gpu_backend import FakeGpuBackend

    both = (reading(bits=0x4, pids=[os.getpid(), foreign_pid]), reading(sm=1400))
    nvml = install(monkeypatch, *both)

    class Sampled(FakeGpuBackend):
        """Each pass lasts until it was sampled."""

        def generate(self, *args: Any, **kwargs: Any) -> Any:
            seen = nvml.reads
            while nvml.reads == seen:
                time.sleep(0.001)
            return super().generate(*args, **kwargs)

    cfg = make_cfg(tp=1, timing="stamps", device="cuda", results_dir=str(tmp_path / "runs"))
    run = tmp_path / "runs" / "run"
    measure_point(Sampled(cfg, "eager"), make_point(cfg), run / "points" / "p")
    results = load(run)
    point = results.points.iloc[0]
    assert (point["sm_clock_mhz"], point["throttled"], point["gpu_others"]) == (1980.0, 1.0, 1)
    assert point["throttle_reasons"] == "sw_power_cap" and "shared GPU: 1" in point["notes"]
    rows = results.telemetry
    assert {"before", "during", "after"} == set(rows["when"])
    assert rows[rows["when"] == "during"]["pass"].nunique() == rows["pass"].nunique()
    memory = results.memory.set_index("name")["bytes"]
    assert (memory["device_used_bytes"], memory["weights_bytes"]) == (1 << 30, 1000)
    _, cells, _ = view(summary(run))
    assert cells[0][-1].startswith("throttled: sw_power_cap on gpu0 in 100% of the samples; shared")
    assert window.Sampler is Sampler
