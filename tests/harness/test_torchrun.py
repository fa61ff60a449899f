"""A sweep whose ranks torchrun has started on two nodes: an ordinary run, of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.__main__ import main
from harness.machine.capabilities import Machine, skip_reason
from harness.machine.fingerprint import digest
from harness.machine.hardware import fingerprint
from harness.planning.device_lock import devices_of, held, held_for_torchrun
from harness.planning.plan import resolve
from harness.store import load
from tests.support.nodes import two_nodes
from tests.support.plans import config, plan, sweep


def test_the_first_process_runs_the_sweep_and_the_others_serve_its_ranks(tmp_path: Path) -> None:
    # The two nodes are one machine here, whose CPU only one of them could hold.
    words = ["tp=2,4", "device=cpu", "model=tiny", "workload.output_tokens=4", "device_lock=off"]
    words += ["measure.max_repeats=1", "measure.min_repeats=1", f"results_dir={tmp_path}"]
    with two_nodes("harness", *words) as nodes:
        assert [node.wait(150) for node in nodes] == [0, 0]
    (run,) = (path.parent for path in tmp_path.glob("*/plan.json"))
    results = load(run)
    rows = results.points.set_index("tp")
    assert dict(rows["status"]) == {2: "ok", 4: "skipped"}
    assert rows.loc[4, "reason"] == "needs 4 processes, torchrun has started 2"
    assert '"ranks":"torchrun"' in rows.loc[2, "effective"]
    figures = results.metrics
    counted = figures[(figures["name"] == "all_reduces_per_step") & (figures["stat"] == "p50")]
    assert set(counted["value"]) == {2 * 4 + 1}, "of a model of four layers"
    collectives = results.collectives
    assert set(collectives["rank"]) == {0, 1}


def test_how_the_harness_was_started_decides_where_ranks_are() -> None:
    cpu = Machine(gpus=0, cores=2, cxx=None, packages={}, processes=2)
    assert resolve(config(), cpu)["engine"]["ranks"] == "torchrun"
    assert (
        "ranks" not in resolve(config(), Machine(gpus=0, cores=2, cxx=None, packages={}))["engine"]
    )
    four = Machine(gpus=4, cores=2, cxx=None, packages={"triton": "3.6"}, processes=4)
    assert skip_reason(config(tp=4, device="cuda"), four) is None
    assert skip_reason(config(tp=8, device="cuda"), four) == (
        "needs 8 processes, torchrun has started 4"
    )


def test_nodes_tell_machines_apart() -> None:
    one = {"cpu": "a", "cpu_cores": 2, "memory_bytes": 2**30, "gpus": [], "os": "Linux"}
    plain = {"cpu": "a", "cores": 2, "memory_gib": 1, "gpus": [], "os": "Linux"}
    assert fingerprint({**one, "nodes": 1}) == fingerprint(one) == digest(plain)
    assert fingerprint({**one, "nodes": 2}) == digest({**plain, "nodes": 2})


@pytest.mark.parametrize(
    ("group", "local", "taken"), [("0", "0", False), ("1", "1", False), ("1", "0", True)]
)
def test_the_first_process_of_each_further_node_holds_its_devices(
    group: str, local: str, taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANGEFINDER_LOCKS", str(tmp_path))
    for name, value in {"GROUP_RANK": group, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("harness.planning.device_lock.gpus", lambda: [{}, {}])
    monkeypatch.setattr("harness.planning.device_lock._uuids", lambda: ["GPU-a", "GPU-b", "GPU-c"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with held_for_torchrun("wait"):
        assert sorted(path.name for path in tmp_path.iterdir()) == ["GPU-a", "GPU-b"] * taken
    with held(["GPU-a", "GPU-b"], "refuse", "this", print):
        pass


def test_a_further_node_that_is_in_use_says_so_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANGEFINDER_LOCKS", str(tmp_path))
    names = {"TORCHELASTIC_RUN_ID": "x", "GROUP_RANK": "1", "LOCAL_RANK": "0"}
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setattr("harness.planning.device_lock.gpus", list)
    with held(["cpu"], "wait", "another run", print):
        assert main(["run", "tp=2", "device_lock=refuse"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: device_lock=refuse: process ") and "is timing on cpu" in err


def test_the_caller_holds_the_gpus_of_its_own_node(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(gpus=4, cores=2, cxx=None, packages={"triton": "3.6"}, processes=4)
    points = plan(sweep({"device": "cuda"}, tp=[1, 4]), machine).points
    monkeypatch.setattr("harness.planning.device_lock._uuids", lambda: ["GPU-a", "GPU-b"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in {
        "TORCHELASTIC_RUN_ID": "x",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
    }.items():
        monkeypatch.setenv(name, value)
    assert devices_of(points) == ["GPU-a", "GPU-b"]
