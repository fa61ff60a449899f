"""Which nsys is taken, what it is told, and what is said where there is none."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from harness.nsys.command import Nsys, NsysError, deafness, find, numbers, report_of, version_of
from harness.nsys.verb import _wait
from tests.support.fake_engine import alive, wait_until


def script(path: Path, says: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)
    return path


def said(version: str) -> str:
    return f"NVIDIA Nsight Systems version {version}-253236389321v0"


def test_nsys_variable_then_path_then_the_newest_place(tmp_path: Path) -> None:
    named = script(tmp_path / "named" / "own-nsys", said("2026.1.1.5"))
    on_path = script(tmp_path / "bin" / "nsys", said("2025.3.2.474"))
    for version in ("2025.1.3.140", "2025.10.1.3", "2025.3.2.474"):
        script(tmp_path / "opt" / version / "bin" / "nsys", said(version))
    places = [f"{tmp_path}/opt/*/bin/nsys", f"{tmp_path}/none/nsys"]
    path = {"PATH": str(on_path.parent)}
    assert find({**path, "NSYS": str(named)}, places) == Nsys(str(named), "2026.1.1.5")
    assert find(path, places) == Nsys(str(on_path), "2025.3.2.474")
    newest = find({"PATH": str(tmp_path / "empty")}, places)
    assert newest == Nsys(f"{tmp_path}/opt/2025.10.1.3/bin/nsys", "2025.10.1.3")


def test_what_is_said_where_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(
        NsysError, match=r"nsys is on no PATH and .*\n.*nsight-systems-cli, 2025.3 or newer"
    ):
        find({"PATH": str(tmp_path)}, [])
    with pytest.raises(NsysError, match=r"NSYS=/gone/nsys: no such program"):
        find({"PATH": str(tmp_path), "NSYS": "/gone/nsys"}, [])
    odd = script(tmp_path / "nsys", "usage: nsys")
    with pytest.raises(NsysError, match="--version names no version: usage: nsys"):
        version_of(str(odd))


@pytest.mark.parametrize(
    ("nsys", "nvtx", "deaf"),
    [
        ("2022.4.2.1", "0.2.17", True),  # as Debian packages them
        ("2023.4.4.54", "0.2.12", True),
        ("2023.4.4.54", "0.2.11", False),
        ("2025.3.2.474", "0.2.17", False),
    ],
)
def test_old_versions_that_record_no_ranges(nsys: str, nvtx: str, deaf: bool) -> None:
    found = deafness(nsys, nvtx)
    assert (found is not None) == deaf
    if found is not None:
        assert found.startswith(f"nsys {nsys} records no range of nvtx {nvtx}: take nsys 2025.3 ")


def test_versions_are_compared_as_numbers() -> None:
    assert numbers("2025.10.1") > numbers("2025.3.2.474")
    assert numbers("0.2.17.post1") == (0, 2, 17)


def test_the_command_lines() -> None:
    nsys = Nsys("/opt/nsys", "2025.3.2")
    command = nsys.profile(Path("run/report"), ["python", "-m", "harness", "tp=2"])
    assert command[:2] == ["/opt/nsys", "profile"] and command[-4:] == [
        "python", "-m", "harness", "tp=2"
    ]  # fmt: skip
    assert set(command[2:-4]) == {
        "--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none", "--cuda-graph-trace=node",
        "--capture-range=cudaProfilerApi", "--capture-range-end=stop", "--kill=none",
        "--wait=primary", "--output=run/report",
    }  # fmt: skip
    assert nsys.export(Path("a.nsys-rep"), Path("a.sqlite")) == [
        "/opt/nsys", "export", "--type=sqlite", "--output=a.sqlite", "a.nsys-rep"
    ]  # fmt: skip


def test_a_report_that_was_not_made(tmp_path: Path) -> None:
    nsys = Nsys(str(tmp_path / "host" / "target-linux-x64" / "nsys"), "2025.3.2")
    report = tmp_path / "report"
    with pytest.raises(NsysError, match="no report .*report.nsys-rep: no rank called"):
        report_of(report, nsys)
    (tmp_path / "report.qdstrm").write_text("raw")
    with pytest.raises(NsysError, match=r"no QdstrmImporter stands in .*host/\*/.*profile --read"):
        report_of(report, nsys)
    importer = tmp_path / "host" / "linux-desktop-x64" / "QdstrmImporter"
    script(importer, "a library is missing")
    with pytest.raises(NsysError, match="QdstrmImporter: a library is missing"):
        report_of(report, nsys)
    importer.write_text('#!/bin/sh\ncp "${1#--input-file=}" "${2#--output-file=}"\n')
    assert report_of(report, nsys) == tmp_path / "report.nsys-rep"
    assert (tmp_path / "report.nsys-rep").read_text() == "raw"
    importer.unlink()
    assert report_of(report, nsys) == tmp_path / "report.nsys-rep", "it is there now"


def test_an_nsys_that_hangs_is_killed_with_all_below_it(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    hanging = ["/bin/sh", "-c", f"sleep 600 & echo $$ $! > {pids}; wait"]
    with pytest.raises(
        NsysError, match=r"nsys had not ended after 5 s \(measure.startup_timeout_s"
    ):
        _wait(hanging, 5)
    both = [int(pid) for pid in pids.read_text().split()]
    assert len(both) == 2 and wait_until(lambda: not any(map(alive, both)), 60)


def test_an_interrupt_reaches_the_command_once_and_is_waited_for(tmp_path: Path) -> None:
    """It must have come to its end, as nsys must, which writes its report then."""
    code = (
        "import signal, sys, time, pathlib\n"
        "seen = []\n"
        "signal.signal(signal.SIGINT, lambda *_: seen.append(1))\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "(folder / 'ready').touch()\n"
        "while not seen: time.sleep(0.01)\n"
        "time.sleep(0.3)\n"
        "(folder / 'ended').write_text(str(len(seen)))\n"
    )

    def interrupt() -> None:
        wait_until((tmp_path / "ready").exists, 30)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        _wait([sys.executable, "-c", code], 60)
    thread.join()
    assert (tmp_path / "ended").read_text() == "1"
