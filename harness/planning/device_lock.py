"""One run at a time on a device: a lock for each GPU of this machine, and one for its CPU"""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from harness.machine.capabilities import torchrun_processes
from harness.machine.hardware import gpus
from harness.planning.plan import Point

FOLDER = "/tmp/rangefinder-locks"
"""Local to the machine and the same for all its users; $RANGEFINDER_LOCKS names another."""


class LockError(RuntimeError):
    """A device that another run is timing on, or a lock that cannot be asked for."""


def devices_of(points: Sequence[Point]) -> list[str]:
    """What the points that are not skipped run on: the first GPUs that are visible, as many as the
    largest tp, by UUID; `cpu` for those of device=cpu, since cores share caches and memory."""
    running = [point.cfg for point in points if point.skip is None]
    gpus = max((cfg["tp"] for cfg in running if cfg["device"] == "cuda"), default=0)
    if torchrun_processes():  # the others are of other machines
        gpus = min(gpus, int(os.environ["LOCAL_WORLD_SIZE"]))
    cpu = any(cfg["device"] == "cpu" for cfg in running)
    return gpu_names(gpus) + ["cpu"] * cpu


@contextmanager
def held_for_torchrun(mode: str) -> Iterator[None]:
    """The locks of a machine that torchrun adds to the caller's: its first process holds those of
    all that it has started there, or of the CPU where no GPU is visible."""
    devices: list[str] = []
    if int(os.environ["GROUP_RANK"]) > 0 and os.environ["LOCAL_RANK"] == "0":
        devices = gpu_names(int(os.environ["LOCAL_WORLD_SIZE"])) if gpus() else ["cpu"]
    with held(devices, mode, "ranks of another machine's run", partial(print, file=sys.stderr)):
        yield


def gpu_names(count: int) -> list[str]:
    """UUIDs of the first `count` GPUs that CUDA_VISIBLE_DEVICES leaves, in its order; what it says
    of one where the driver cannot be asked."""
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    uuids = _uuids() if count else []
    if text is None:
        parts = [str(index) for index in range(count)]
    else:
        parts = [part for part in (p.strip() for p in text.split(",")) if part][:count]
    return [_named(part, uuids) for part in parts]


def _named(part: str, uuids: Sequence[str]) -> str:
    """An index or a (shortened) UUID -> the UUID."""
    if part.isdigit():
        return uuids[int(part)] if int(part) < len(uuids) else f"gpu{part}"
    return next((uuid for uuid in uuids if uuid.startswith(part)), part.replace("/", "-"))


def _uuids() -> list[str]:
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # not installed, or no driver: NVMLError is not importable then
        return []
    try:
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        found = map(pynvml.nvmlDeviceGetUUID, handles)
        return [uuid.decode() if isinstance(uuid, bytes) else str(uuid) for uuid in found]
    finally:
        pynvml.nvmlShutdown()


@contextmanager
def held(
    devices: Sequence[str], mode: str, owner: str, say: Callable[[str], None]
) -> Iterator[None]:
    """Holds the locks of `devices` while the context is open. The kernel frees them with the
    process, however it ends.

    Args:
        mode: wait, for as long as another holds one; refuse; off, which asks for none.
        owner: what others are told of this run.
        say: hears that this run waits, and for whom.

    Raises:
        LockError: mode=refuse and a device is in use; a lock file cannot be opened.
    """
    descriptors: list[int] = []
    try:
        # In one order for all, so that no two runs wait for each other.
        for device in sorted(devices) if mode != "off" else ():
            descriptors.append(_acquire(device, mode, owner, say))
        yield
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _acquire(device: str, mode: str, owner: str, say: Callable[[str], None]) -> int:
    path = Path(os.environ.get("RANGEFINDER_LOCKS", FOLDER)) / device
    try:
        descriptor = _open(path)
    except OSError as error:
        raise LockError(
            f"device_lock={mode}: {path} cannot be opened ({error.strerror}), so nobody knows "
            f"whether another run is timing on {device}; set RANGEFINDER_LOCKS to a folder that "
            "can be written, or give device_lock=off"
        ) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            other = os.pread(descriptor, 1000, 0).decode(errors="replace") or "another run"
            if mode == "refuse":
                raise LockError(
                    f"device_lock=refuse: {other} is timing on {device} of this machine; wait for "
                    "it, end it, or give device_lock=wait"
                ) from None
            say(f"waiting for {device}, on which {other} is timing (device_lock=wait)")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        with suppress(OSError):  # another user's file may be open for reading only
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} ({owner})".encode(), 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _open(path: Path) -> int:
    """A descriptor of a lock file that any user of the machine may open."""
    flags = os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        path.parent.mkdir(parents=True)
        path.parent.chmod(0o1777)
    except FileExistsError:
        pass
    try:
        descriptor = os.open(path, flags | os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        os.fchmod(descriptor, 0o666)  # whatever the umask
        return descriptor
    except FileExistsError:
        pass
    try:
        return os.open(path, flags | os.O_RDWR)
    except PermissionError:
        return os.open(path, flags | os.O_RDONLY)
