from __future__ import annotations

import importlib
import json
import py_compile
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.machine import hardware

SECRETS = {
    "HF_TOKEN": "hf_abc",
    "AWS_SECRET_ACCESS_KEY": "s3cr3t",
    "TORCH_HUB_TOKEN": "t0k3n",
    "NCCL_API_KEY": "k3y",
    "CUDA_PASSWORD": "p4ss",
    "GITHUB_PAT": "gh_x",
    "HOME": "at home",
}


def test_only_listed_variables_and_never_a_secret() -> None:
    harmless = {"CUDA_VISIBLE_DEVICES": "0", "NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "4",
                "TORCHINDUCTOR_CACHE_DIR": "/c", "PYTORCH_ALLOC_CONF": "x"}  # fmt: skip
    assert hardware.environment_variables({**harmless, **SECRETS}) == harmless


def test_what_stands_before_the_host_of_a_url_is_cut() -> None:
    found = hardware.environment_variables({"TORCHINDUCTOR_REMOTE": "redis://me:pw@cache:6379/0"})
    assert found == {"TORCHINDUCTOR_REMOTE": "redis://cache:6379/0"}


def test_the_capture_holds_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    hardware._capture.cache_clear()
    text = json.dumps(hardware.capture())
    hardware._capture.cache_clear()
    assert '"NCCL_DEBUG": "WARN"' in text
    for name in ("HF_TOKEN", "hf_abc", "s3cr3t", "t0k3n", "k3y", "p4ss", "gh_x"):
        assert name not in text


def test_the_capture_says_machine_software_and_commit() -> None:
    import torch

    found = hardware.capture()
    # The package's metadata leave out the build (+cu130) that a wheel of the registry was made for.
    assert torch.__version__.startswith(found["versions"]["torch"])
    assert found["versions"]["python"].startswith("3.")
    assert found["cpu"] and found["cpu_cores"] >= 1 and found["memory_bytes"] > 2**28
    assert found["fingerprint"] == hardware.fingerprint(found) == hardware.fingerprint()
    assert len(found["fingerprint"]) == 12
    sha = found["git"]["sha"]
    assert sha is None or (len(sha) == 40 and isinstance(found["git"]["dirty"], bool))


def test_whether_torch_is_kept_as_bytecode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of that name in a folder of its own: as installed, and compiled."""
    (tmp_path / "torch.py").write_text("")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    importlib.invalidate_caches()
    assert hardware.bytecode() is False
    py_compile.compile(str(tmp_path / "torch.py"))
    assert hardware.bytecode() is True
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "elsewhere"))
    assert hardware.bytecode() is False
    monkeypatch.setattr(sys, "path", [])
    assert hardware.bytecode() is None


def test_the_fingerprint_is_of_the_machine_alone() -> None:
    machine: dict[str, Any] = {
        "cpu": "A", "cpu_cores": 8, "memory_bytes": 64 * 2**30, "os": "Linux 6 x86_64",
        "gpus": [{"name": "H200", "memory_bytes": 1, "driver": "580"}], "host": "one",
        "versions": {"torch": "2.11"},
    }  # fmt: skip
    base = hardware.fingerprint(machine)
    assert hardware.fingerprint({**machine, "host": "two", "versions": {}}) == base
    assert hardware.fingerprint({**machine, "memory_bytes": 64 * 2**30 + 4096}) == base
    for change in ({"cpu": "B"}, {"cpu_cores": 4}, {"gpus": []}, {"memory_bytes": 2**30}):
        assert hardware.fingerprint({**machine, **change}) != base


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ("", []),
        ("0", [0]),
        ("2,0", [2, 0]),
        ("1,-1,0", [1]),
        ("0,9,1", [0]),
        ("GPU-d,GPU-abc", [3, 1]),
        ("GPU-d,GPU-none,0", [3]),
        ("MIG-abc,MIG-d", [0, 1]),
    ],
)
def test_visible_gpus_as_cuda_counts_them(value: str, wanted: list[int]) -> None:
    assert hardware.visible_gpus(["GPU-aa", "GPU-abcd", "GPU-c", "GPU-d"], value) == wanted


def test_telemetry_rows_have_a_value_or_a_reason() -> None:
    from harness.machine.telemetry import read

    rows = read("before")
    assert {row["name"] for row in rows} >= {
        "load_1m", "clock_mhz", "cpu_busy_s", "cpu_own_s", "cores"
    }  # fmt: skip
    assert all((row["value"] is None) == (row["reason"] is not None) for row in rows)


def cpu_rows(
    busy_s: float | None, own_s: float, cores: int = 2, device: str = "cpu"
) -> list[dict[str, Any]]:
    """Readings round a window in which these CPU seconds were used."""
    at = {"before": (1000.0, 50.0), "after": (busy_s and 1000.0 + busy_s, 50.0 + own_s)}
    return [
        {"when": when, "device": device, "name": name, "value": value}
        for when, values in at.items()
        for name, value in zip(("cpu_busy_s", "cpu_own_s", "cores"), (*values, cores), strict=True)
    ]


@pytest.mark.parametrize(
    ("windows", "others"),
    [
        ([(1.0, cpu_rows(2.0, 1.0))], "1.0 of 2 cores"),
        ([(1.0, cpu_rows(1.9, 1.9))], None),
        ([(2.0, cpu_rows(2.75, 2.0))], None),  # 0.375 of 2 cores: 19 %
        ([(2.0, cpu_rows(3.0, 2.0))], "0.5 of 2 cores"),
        ([(2.0, cpu_rows(3.0, 2.0, cores=4))], None),
        ([(0.3, cpu_rows(0.6, 0.2))], None),  # too short to tell
        ([(0.3, cpu_rows(0.6, 0.2)), (0.3, cpu_rows(0.4, 0.2))], "1.0 of 2 cores"),
        ([(1.0, cpu_rows(None, 1.0))], None),
        ([(1.0, [])], None),
        ([], None),
    ],
)
def test_other_processes_above_a_fifth_of_the_cores_are_noted(
    windows: list[tuple[float, list[dict[str, Any]]]], others: str | None
) -> None:
    from harness.machine.telemetry import busy_note

    wanted = others and f"busy machine: other processes used {others} during the plain pass"
    assert busy_note(windows) == wanted


BURN = """
import json, time
from harness.machine.telemetry import read
def values():
    return {row["name"]: row["value"] for row in read("before")}
before, until = values(), time.process_time() + 0.3
while time.process_time() < until:
    pass
print(json.dumps([before, values()]))
"""


def test_own_work_is_told_from_that_of_others() -> None:
    """What a session burns is in both readings: the difference is not charged to others. In one of
    five runs at least: while a virtual machine stands still, its ticks do and CPU time does not."""
    assert any(burnt_in_both_readings() for _ in range(5))


def burnt_in_both_readings() -> bool:
    done = subprocess.run(
        [sys.executable, "-c", BURN], capture_output=True, text=True, timeout=60, check=True,
        start_new_session=True, cwd=Path(__file__).resolve().parents[3],
    )  # fmt: skip
    before, after = json.loads(done.stdout)
    if before["cpu_busy_s"] is None:
        pytest.skip("this system does not count the CPU time of its cores")
    own = after["cpu_own_s"] - before["cpu_own_s"]
    assert 0.27 <= own < 5
    return bool(after["cpu_busy_s"] - before["cpu_busy_s"] >= own - 0.1)
