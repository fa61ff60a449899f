"""Ceilings of this machine's GPU, measured once: how fast it reads, and multiplies in bf16.

They are kept beside the runs' folder, in hardware/<fingerprint of the machine>.json.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.roofline import Ceilings

READ_BYTES = 4 << 30
SIDE = 8192  # of the square matrices
RUNS = 10
TIMEOUT_S = 120.0


def path_of(cfg: Mapping[str, Any]) -> Path:
    """Where this machine's ceilings stand for runs in `results_dir`."""
    from harness.hardware import fingerprint

    return Path(cfg["results_dir"]).parent / "hardware" / f"{fingerprint()}.json"


def load(cfg: Mapping[str, Any]) -> Ceilings | None:
    """None where they were not measured."""
    from harness.roofline import Ceilings

    path = path_of(cfg)
    if not path.exists():
        return None
    found = json.loads(path.read_text(encoding="utf-8"))
    return Ceilings(found["read_bytes_s"], found["matmul_flops_s"])


def ensure(cfg: Mapping[str, Any]) -> str | None:
    """Measures what is not there yet, in a process of its own, so that this one holds no GPU
    context. -> why there are none; None if there are."""
    path = path_of(cfg)
    if path.exists():
        return None
    command = [sys.executable, "-m", "harness.ceilings", str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"measuring took more than {TIMEOUT_S:.0f} s"
    if done.returncode or not path.exists():
        return (done.stderr.strip().splitlines() or ["no reason was given"])[-1]
    return None


def measure() -> dict[str, Any]:
    """On the first GPU: bytes/s of a sum over 4 GiB, and operations/s of an 8192^3 bf16 product,
    each the fastest of RUNS runs."""
    import torch

    def seconds(run: Callable[[], Any]) -> float:
        for _ in range(3):
            run()
        times = []
        for _ in range(RUNS):
            begin = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            begin.record()
            run()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        return min(times)

    values = torch.ones(READ_BYTES // 4, device="cuda")
    read = READ_BYTES / seconds(values.sum)
    del values
    a = torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16)
    matmul = 2.0 * SIDE**3 / seconds(lambda: a @ b)
    return {
        "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "read_bytes_s": read,
        "read": f"sum over {READ_BYTES} bytes of float32, fastest of {RUNS}",
        "matmul_flops_s": matmul,
        "matmul": f"{SIDE}^3 in bfloat16, fastest of {RUNS}",
    }


def main(path: Path) -> None:
    """Measures and writes the file whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(measure(), indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
