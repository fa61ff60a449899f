"""What one rank holds of its device's memory."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from engine.kv_cache import KVCache


def readings(
    model: nn.Module, kv_cache: KVCache, graph_pool_bytes: int | None, device: torch.device
) -> dict[str, int | None]:
    """Bytes: weights, K/V, CUDA graphs (None: there are none), and the peak (GPU: reserved by the
    allocator; CPU: resident set)."""
    weights = {p.untyped_storage().data_ptr(): p.nbytes for p in model.parameters()}
    peak: int | None
    if device.type == "cuda":
        peak = torch.cuda.max_memory_reserved(device)
    else:
        peak = _peak_resident_bytes()
    return {
        "weights_bytes": sum(weights.values()),
        "kv_bytes": kv_cache.nbytes,
        "graph_pool_bytes": graph_pool_bytes,
        "peak_bytes": peak,
    }


def _peak_resident_bytes() -> int | None:
    """This process's peak resident set, None where the system does not tell (not Linux).

    Not getrusage: its ru_maxrss survives exec, so a spawned rank would report its parent's peak.
    """
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)
