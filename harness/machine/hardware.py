"""Machine and software, captured by allow-list, and the hash that identifies the machine."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import socket
import subprocess
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from harness.machine.fingerprint import digest

# Only variables that change how the engine runs; a name that looks like a secret is left out even
# then, and what stands before an @ in a URL is cut.
ENV_PREFIXES = ("CUDA_", "NCCL_", "TORCH", "PYTORCH_", "OMP_", "MKL_", "KMP_", "GLOO_", "TRITON_",
                "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "VLLM_")  # fmt: skip
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSW|CREDENTIAL|AUTH|COOKIE", re.IGNORECASE)
_URL_USER = re.compile(r"(?<=://)[^/@\s]+@")

# Table column -> names of the distributions that provide it.
PACKAGES = {
    "torch": ("torch",),
    "triton": ("triton", "pytorch-triton"),
    "nccl": ("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
    "flash_attn": ("flash-attn",),
    "flash_attn_4": ("flash-attn-4",),
    "transformers": ("transformers",),
    "vllm": ("vllm",),
    "nano_vllm": ("nano-vllm",),
    "numpy": ("numpy",),
    "nvtx": ("nvtx",),
}


def environment_variables(environ: dict[str, str] | None = None) -> dict[str, str]:
    """The allow-listed variables of `environ` (this process' by default)."""
    source = os.environ if environ is None else environ
    return {
        name: _URL_USER.sub("", value)
        for name, value in sorted(source.items())
        if name.startswith(ENV_PREFIXES) and not _SECRET.search(name)
    }


# Those that the row of a point names.
VERSIONS = ("python", "torch", "triton", "nccl", "flash_attn", "transformers")


def versions() -> dict[str, str | None]:
    """Versions of the packages that results depend on, without importing them; None: absent."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name, distributions in PACKAGES.items():
        found[name] = next(filter(None, map(_version, distributions)), None)
    return found


def bytecode() -> bool | None:
    """Whether Python finds torch compiled to bytecode; None without torch. Where it does not (a
    read-only installation, PYTHONDONTWRITEBYTECODE) each process compiles it anew: some 3 s of
    an engine's start on an H200's host."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return None
    return Path(importlib.util.cache_from_source(torch.origin)).exists()


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


@cache
def gpus() -> tuple[dict[str, Any], ...]:
    """Name, memory and compute capability of each GPU that this process may use, through NVML; an
    empty tuple where there is no NVIDIA driver or nvidia-ml-py is not installed."""
    try:
        import pynvml
    except ImportError:
        return ()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
        found = []
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        uuids = [_text(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]
        for index in visible_gpus(uuids):
            handle = handles[index]
            capability = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
            found.append(
                {
                    "index": index,
                    "name": _text(pynvml.nvmlDeviceGetName(handle)),
                    "memory_bytes": int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
                    "capability": ".".join(map(str, capability)),
                    "driver": driver,
                }
            )
        return tuple(found)
    finally:
        pynvml.nvmlShutdown()


def visible_gpus(uuids: Sequence[str], value: str | None = None) -> list[int]:
    """NVML's indices of the GPUs that CUDA_VISIBLE_DEVICES leaves of those with `uuids`, which it
    may give or begin. MIG names are counted in their order: NVML has no index of them."""
    text = os.environ.get("CUDA_VISIBLE_DEVICES") if value is None else value
    if text is None:
        return list(range(len(uuids)))
    chosen: list[int] = []
    for place, part in enumerate(filter(None, (p.strip() for p in text.split(",")))):
        if part.startswith("GPU-"):
            index = next((i for i, uuid in enumerate(uuids) if uuid.startswith(part)), -1)
        else:
            index = int(part) if part.lstrip("-").isdigit() else place
        if not 0 <= index < len(uuids):
            break  # CUDA ignores everything after the first that is not valid
        chosen.append(index)
    return chosen


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def cpu_name() -> str:
    """The CPU's name as the kernel gives it, else the architecture."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def cpu_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_bytes() -> int | None:
    """Physical memory of the machine; None where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


@cache
def git() -> dict[str, Any]:
    """Commit of the tree that this file belongs to; None values for an installed copy."""
    here = Path(__file__).resolve()

    def ask(*arguments: str) -> str | None:
        command = ["git", "-C", str(here.parent), *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    if not ask("ls-files", "--error-unmatch", here.name):
        return {"sha": None, "dirty": None}
    changed = ask("status", "--porcelain", "--untracked-files=no")
    return {"sha": ask("rev-parse", "HEAD"), "dirty": None if changed is None else changed != ""}


def fingerprint(machine: dict[str, Any] | None = None) -> str:
    """12 hexadecimal digits of what makes two machines comparable: CPU, cores, memory to a GiB, the
    GPUs and their driver, the operating system, the number of nodes. Of this machine by default."""
    if machine is None:
        return str(capture()["fingerprint"])
    memory = machine.get("memory_bytes")
    what = {
        "cpu": machine.get("cpu"),
        "cores": machine.get("cpu_cores"),
        "memory_gib": None if memory is None else round(memory / 2**30),
        "gpus": [[g["name"], g["memory_bytes"], g["driver"]] for g in machine.get("gpus", ())],
        "os": machine.get("os"),
    }
    if machine.get("nodes", 1) > 1:  # alike, as far as this one can tell
        what["nodes"] = machine["nodes"]
    return digest(what)


@cache
def _capture() -> str:
    cards = list(gpus())
    found: dict[str, Any] = {
        "host": socket.gethostname(),
        "os": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": cpu_name(),
        "cpu_cores": cpu_cores(),
        "memory_bytes": memory_bytes(),
        "gpus": cards,
        "nodes": int(os.environ.get("GROUP_WORLD_SIZE", 1)),  # of torchrun
        "driver": cards[0]["driver"] if cards else None,
        "versions": versions(),
        "bytecode": bytecode(),
        "env": environment_variables(),
        "git": git(),
    }
    found["fingerprint"] = fingerprint(found)
    return json.dumps(found, allow_nan=False)


def capture() -> dict[str, Any]:
    """Everything above, read once a process: host, os, cpu, cpu_cores, memory_bytes, gpus, nodes,
    driver, versions, bytecode, env, git {sha, dirty}, fingerprint. All of it is what JSON can hold.
    """
    found: dict[str, Any] = json.loads(_capture())
    return found
