"""A machine and steps made by the prediction's own model, so that every number is known."""

from __future__ import annotations

from typing import Any

from harness.measuring.roofline import Ceilings
from harness.prediction.model import Fit

CEILINGS = Ceilings(4e12, 8e14)
TRUE = Fit(read=1.25, matmul=1.6, layers=40.0)
SETTINGS = {"device": "cuda", "enforce_eager": False, "compile": "model", "attention": "flash2",
            "dtype": "bfloat16", "page_size": 256}  # fmt: skip
_LAST = {"all_reduce": 1 << 26, "gather": 1 << 28, "broadcast": 1 << 12}


def comm_us(kind: str, world: int, nbytes: float) -> float:
    """9 us, and 4 us a MiB that a link carries; at the sizes of `calibrated_rows`."""
    carried = {"all_reduce": 2 * (world - 1) / world, "gather": (world - 1) / world}.get(kind, 1.0)
    return 9.0 + 4.0 * carried * nbytes / 2**20


def calibrated_rows(worlds: tuple[int, ...] = (2,)) -> list[dict[str, Any]]:
    """Powers of two, and the gathers of the batches that the tests ask for."""
    rows = []
    for kind, last in _LAST.items():
        first = {"all_reduce": 2048, "gather": 1 << 18, "broadcast": 8}[kind]
        sizes = {first << e for e in range(27) if first << e <= last}
        sizes |= (
            {151_936 * 2 * batch for batch in (1, 8, 32, 256, 512)} if kind == "gather" else set()
        )
        for world in worlds:
            for mode in ("eager", "graph"):
                for size in sorted(sizes):
                    rows.append({
                        "kind": kind, "path": "nccl", "world": world, "mode": mode, "bytes": size,
                        "transfer_us": comm_us(kind, world, size),
                    })  # fmt: skip
    return rows
