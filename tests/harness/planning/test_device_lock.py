"""Never two runs on one device: the second waits and says so, or refuses; others go on."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.planning.device_lock import LockError, devices_of, gpu_names, held
from tests.support import fake_nvml
from tests.support.cli import Cli
from tests.support.fake_engine import behave, recorded, wait_until
from tests.support.plans import CPU, Machine, plan, sweep

HOLDER = """
import sys
from harness.planning.device_lock import held
with held(sys.argv[1].split(","), "wait", "results/runs/other", print):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RANGEFINDER_LOCKS", str(tmp_path / "locks"))
    return tmp_path / "locks"


@pytest.fixture
def cli(tmp_path: Path, locks: Path) -> Cli:
    return Cli(tmp_path)


def holder(devices: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, devices],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def silent(text: str) -> None:
    raise AssertionError(text)


def test_a_device_in_use_is_refused_by_name_and_another_one_is_not(locks: Path) -> None:
    with holder("GPU-1,cpu") as process:
        with held(["GPU-0"], "refuse", "this", silent), held(["cpu"], "off", "this", silent):
            pass
        with pytest.raises(LockError) as refused, held(["GPU-0", "GPU-1"], "refuse", "me", silent):
            raise AssertionError("held by two")
        assert str(refused.value) == (
            f"device_lock=refuse: process {process.pid} (results/runs/other) is timing on GPU-1 of "
            "this machine; wait for it, end it, or give device_lock=wait"
        )
        with held(["GPU-0"], "refuse", "this", silent):
            pass  # what was held before the refusal is free again
        process.communicate()
    with held(["GPU-0", "GPU-1", "cpu"], "refuse", "this", silent):
        pass


@pytest.mark.parametrize("end", [signal.SIGKILL, None])
def test_one_who_waits_goes_on_when_the_other_has_ended_however(
    locks: Path, end: signal.Signals | None
) -> None:
    said: list[str] = []
    with holder("cpu") as process:

        def release() -> None:
            assert wait_until(lambda: bool(said), 60)
            if end is None:
                process.communicate()
            else:
                process.send_signal(end)

        thread = threading.Thread(target=release)
        thread.start()
        with held(["cpu"], "wait", "this run", said.append):
            assert process.wait() == (0 if end is None else -end)
            assert (locks / "cpu").read_text() == f"process {os.getpid()} (this run)"
        thread.join()
    assert said == [
        f"waiting for cpu, on which process {process.pid} (results/runs/other) is timing "
        "(device_lock=wait)"
    ]


def test_every_user_of_the_machine_may_open_a_lock(locks: Path) -> None:
    before = os.umask(0o077)
    try:
        with held(["cpu"], "refuse", "this", silent):
            pass
    finally:
        os.umask(before)
    assert stat.S_IMODE((locks / "cpu").stat().st_mode) == 0o666
    assert stat.S_IMODE(locks.stat().st_mode) == 0o1777


def test_a_folder_that_cannot_be_made_is_an_error_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("RANGEFINDER_LOCKS", str(tmp_path / "file"))
    told = pytest.raises(LockError, match=r"set RANGEFINDER_LOCKS .* or give device_lock=off")
    with told, held(["cpu"], "wait", "this", silent):
        pass


def test_a_run_needs_the_gpus_of_its_largest_point_and_the_cpu_for_points_of_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_nvml.install(monkeypatch, *({} for _ in range(4)))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    four = Machine(gpus=4, cores=8, cxx=None, packages={"triton": "3.6.0"})
    first = [f"GPU-{n}{n}{n}{n}-aaaa" for n in range(4)]

    assert devices_of(plan(sweep(tp=[1, 2]), four).points) == first[:2]
    assert devices_of(plan(sweep(tp=[4, 8]), four).points) == first, "tp=8 is skipped"
    assert devices_of(plan(sweep({"device": "cpu"}, tp=[1, 2]), four).points) == ["cpu"]
    assert devices_of(plan(sweep(device=["cpu", "cuda"]), four).points) == [first[0], "cpu"]
    assert devices_of(plan(sweep({"device": "cuda"}, tp=[1]), CPU).points) == [], "skipped"


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        ("2,1", ["GPU-2222-aaaa", "GPU-1111-aaaa"]),
        ("GPU-1111,GPU-0", ["GPU-1111-aaaa", "GPU-0000-aaaa"]),
        ("MIG-GPU-1111/3/0", ["MIG-GPU-1111-3-0"]),
        ("7", ["gpu7"]),
    ],
)
def test_a_gpu_is_the_same_by_whatever_name(
    visible: str, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_nvml.install(monkeypatch, *({} for _ in range(3)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu_names(2) == names


def test_a_second_run_waits_and_then_measures(cli: Cli) -> None:
    behave(cli.folder, p4="hang")
    with cli.start() as first:
        cli.wait_for_point(4)
        behave(cli.folder)
        with cli.start("resume=never") as second:
            waiting = _read_until(second, lambda line: "waiting for cpu" in line)
            assert f"process {first.pid} (" in waiting[-1]
            assert cli.measured() == [0, 1, 2, 3, 4]
            first.send_signal(signal.SIGINT)
            first.communicate()
            out, _ = second.communicate()
    assert (first.returncode, second.returncode) == (130, 0)
    assert '"ok":8' in out.splitlines()[-1]
    assert cli.measured() == [0, 1, 2, 3, 4, *range(8)]


def test_a_run_that_refuses_starts_no_engine_and_can_be_continued(cli: Cli) -> None:
    with holder("cpu") as other:
        with cli.start("device_lock=refuse") as process:
            out, err = process.communicate(timeout=280)
        last = json.loads(out.splitlines()[-1])
        assert process.returncode == 1
        assert out.splitlines()[:-1] == ["no point has ended yet, so there is no table"]
        assert f"device_lock=refuse: process {other.pid} (results/runs/other) is timing" in err
        assert (last["ok"], last["pending"]) == (0, 8)
        assert recorded("starts", cli.folder) == []
        other.communicate()
    status, again, _ = cli.run("device_lock=refuse")
    assert (status, again["run"], again["ok"]) == (0, last["run"], 8)


def _read_until(process: subprocess.Popen[str], found: Callable[[str], bool]) -> list[str]:
    lines: list[str] = []
    assert process.stderr is not None
    while not lines or not found(lines[-1]):
        line = process.stderr.readline()
        assert line, "".join(lines)
        lines.append(line)
    return lines
