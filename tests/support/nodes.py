"""Two nodes of torchrun on this machine, with a process each."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def _port() -> int:
    """One below those that systems hand out, which nobody takes until torchrun does."""
    for port in range(20000 + os.getpid() % 10000, 32000):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise OSError("no port from 20000 to 32000 is free")


@contextmanager
def two_nodes(module: str, *arguments: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Their torchruns, each in a process group of its own, which end with the context: where a
    process was killed, the other node's torchrun waits for the node for minutes."""
    port = _port()
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1",
        "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=test",
        "--local-addr=127.0.0.1", "-m", module, *arguments,
    ]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    nodes = [subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True) for _ in range(2)]
    try:
        yield nodes
    finally:
        for node in nodes:
            with suppress(ProcessLookupError):
                os.killpg(node.pid, signal.SIGKILL)
            node.wait()
