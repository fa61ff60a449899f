"""Where nsys is, which version, and the command lines with which it profiles and exports"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PLACES = (
    "/opt/nvidia/nsight-systems/*/bin/nsys",
    "/opt/nvidia/nsight-systems-cli/*/bin/nsys",
    "/usr/local/cuda*/bin/nsys",
    # Nsight Compute brings a copy, which nothing puts on the PATH.
    "/opt/nvidia/nsight-compute/*/host/target-linux-x64/nsys",
    "/usr/local/cuda*/nsight-compute-*/host/target-linux-x64/nsys",
)
GET = """\
nsys is the command line of NVIDIA Nsight Systems. Install nsight-systems-cli, 2025.3 or newer, from
NVIDIA's package repository (https://developer.nvidia.com/nsight-systems). Nsight Compute has a copy
in its folder host/target-linux-x64. Put nsys on the PATH, or name it: NSYS=/path/to/nsys."""
_DEAF_BEFORE, _NEW_NVTX = (2024, 1), (0, 2, 12)

# Each is there for a reason; `nsys profile --help` describes them.
FLAGS = (
    "--trace=cuda,nvtx",  # what the reader reads, and nothing that costs more
    "--sample=none",  # CPU sampling disturbs, and asks for rights that a container rarely has
    "--cpuctxsw=none",
    # Each kernel of a replay; the default records a graph as one block.
    "--cuda-graph-trace=node",
    # From each rank's cudaProfilerStart on (observers/capture.py), after warm-up.
    "--capture-range=cudaProfilerApi",
    # Not stop-shutdown, the default: the harness still has rows to write. Not none: what follows,
    # closing the communicators above all, is not part of the window.
    "--capture-range-end=stop",
    "--kill=none",
    # Of the harness' own process; a helper of multiprocessing may outlive it by a moment.
    "--wait=primary",
    # No --trace-fork-before-exec: ranks are spawned, and nsys follows what is executed. The flag
    # traces between fork and exec, where a process that has threads may hang.
)


class NsysError(RuntimeError):
    """nsys is absent, too old or failed; the text says what to do."""


@dataclass(frozen=True, slots=True)
class Nsys:
    """An nsys that can be run. `version` is as it prints it, such as 2025.3.2.474."""

    path: str
    version: str

    @property
    def numbers(self) -> tuple[int, ...]:
        return numbers(self.version)

    def profile(self, report: Path, target: Sequence[str]) -> list[str]:
        """The command that runs `target` and leaves `report`.nsys-rep."""
        return [self.path, "profile", *FLAGS, f"--output={report}", *target]

    def export(self, report: Path, sqlite: Path) -> list[str]:
        """The command that exports a report."""
        return [self.path, "export", "--type=sqlite", f"--output={sqlite}", str(report)]


def find(environ: Mapping[str, str] | None = None, places: Sequence[str] = PLACES) -> Nsys:
    """$NSYS, else the first on the PATH, else the newest in the known places.

    Raises:
        NsysError: none is there, or the one that $NSYS names does not run.
    """
    environ = os.environ if environ is None else environ
    named = environ.get("NSYS")
    if named:
        path = shutil.which(named, path=environ.get("PATH"))
        if path is None:
            raise NsysError(f"NSYS={named}: no such program")
        return Nsys(path, version_of(path))
    on_path = shutil.which("nsys", path=environ.get("PATH"))
    if on_path is not None:
        return Nsys(on_path, version_of(on_path))
    found = [Nsys(path, version_of(path)) for path in _in_places(places)]
    if not found:
        raise NsysError(f"nsys is on no PATH and in no known place\n{GET}")
    return max(found, key=lambda nsys: nsys.numbers)


def _in_places(places: Sequence[str]) -> list[str]:
    files = (file for place in places for file in Path("/").glob(place.lstrip("/")))
    return [str(file) for file in files if os.access(file, os.X_OK)]


def version_of(path: str) -> str:
    """What `nsys --version` says.

    Raises:
        NsysError: it does not run, or prints no version.
    """
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NsysError(f"{path} does not run: {error}") from error
    found = re.search(r"\b20\d\d(\.\d+)+", done.stdout)
    if found is None:
        said = (done.stdout + done.stderr).strip()[-200:]
        raise NsysError(f"{path} --version names no version: {said or 'it printed nothing'}")
    return found[0]


def numbers(version: str) -> tuple[int, ...]:
    """2025.3.2 -> (2025, 3, 2); what is no number ends it."""
    return tuple(int(part) for part in re.findall(r"(?:^|\.)(\d+)(?=\.|$)", version))


def deafness(nsys_version: str, nvtx_version: str) -> str | None:
    """Why this nsys would record no range of this nvtx package, or None if it does. nvtx 0.2.12 and
    newer ask for an entry point that nsys 2022.4 and 2023.4 do not answer; nothing is said then."""
    if numbers(nsys_version) >= _DEAF_BEFORE or numbers(nvtx_version) < _NEW_NVTX:
        return None
    return (
        f"nsys {nsys_version} records no range of nvtx {nvtx_version}: take nsys 2025.3 or newer, "
        "or nvtx 0.2.11"
    )


def report_of(report: Path, nsys: Nsys) -> Path:
    """The report that `nsys profile` left for `--output=report`. A copy inside Nsight Compute may
    leave the raw stream alone; an importer that stands beside it is then called here.

    Raises:
        NsysError: there is none, and none can be made.
    """
    made = report.with_name(f"{report.name}.nsys-rep")
    raw = report.with_name(f"{report.name}.qdstrm")
    if made.is_file():
        return made
    if not raw.is_file():
        raise NsysError(
            f"nsys left no report {made}: no rank called cudaProfilerStart, or nsys failed; what "
            "it printed is above"
        )
    host = Path(nsys.path).resolve().parent.parent
    said = f"no QdstrmImporter stands in {host}/*/"
    for importer in sorted(host.glob("*/QdstrmImporter")):
        command = [str(importer), f"--input-file={raw}", f"--output-file={made}"]
        done = subprocess.run(command, capture_output=True, text=True)
        if made.is_file():
            return made
        said = f"{importer}: {(done.stderr + done.stdout).strip()[-300:]}"
    raise NsysError(
        f"nsys left {raw} and no report, and it cannot be imported here ({said}). Where Nsight "
        "Systems is whole: QdstrmImporter --input-file=report.qdstrm, nsys export --type=sqlite "
        "report.nsys-rep, then python -m harness profile --read report.sqlite"
    )
