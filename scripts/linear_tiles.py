"""Times the tiles of the engine's own products against cuBLAS, by the layers' shapes; on a GPU.

    python scripts/linear_tiles.py [--rows 1,8,16,32,64] [--groups "0.6b tp1,..."]

A time is that of one call in a CUDA graph of at least 24, each on a weight of its own, together
four times what L2 holds; the best mean of seven replays behind another, in us. Prints for each
shape and number of rows cuBLAS's time, that of the tile that `tile()` takes, and the three fastest,
and the bandwidth of the fastest. Builds all kernels first, in as many processes as there are cores.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engine.kernels.layers_triton import silu_and_mul_triton
from engine.kernels.linear_triton import Tile, linear_triton, tile

SHAPES = {
    "0.6b tp1": [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)],
    "0.6b tp2": [(2048, 1024), (1024, 1024), (3072, 1024), (1024, 1536)],
    "8b tp1": [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)],
    "8b tp2": [(3072, 4096), (4096, 2048), (12288, 4096), (4096, 6144)],
}
"""[N, K] of qkv, o, gate and up, down; the third of each is gated."""
LINES = [
    Tile(n, k, warps, stages)
    for n, k, warps, stages in product((2, 4, 8, 16), (256, 512, 1024), (4, 8), (1, 3, 6))
    if 512 <= n * k <= 8192
]
TILES = [Tile(n, k, w, s) for n, k, w, s in product((16, 32, 64), (64, 128, 256), (2, 4), (3, 5))]
CALLS, BYTES = 24, 200 << 20


Kind = tuple[int, bool, Tile]
"""What a kernel is built for: rows rounded up, gated, its tile."""


def rounded(rows: int) -> int:
    return 1 if rows == 1 else max(16, 1 << (rows - 1).bit_length())


def fits(rows: int, own: Tile, gated: bool) -> bool:
    """Whether its stages fit in 227 KB of shared memory."""
    block = rounded(rows)
    held = (block + own.block_n * (2 if gated else 1)) * own.block_k * 2
    return rows == 1 or held * own.stages <= 220 << 10


def candidates(rows: int, gated: bool) -> list[Tile]:
    chosen = LINES if rows == 1 else TILES
    shapes = [shape for group in SHAPES.values() for shape in group]
    taken = [tile(rows, n // (2 if gated else 1), inner, 2, gated) for n, inner in shapes]
    return [own for own in dict.fromkeys([*chosen, *taken]) if fits(rows, own, gated)]


def build(kind: Kind) -> str | None:
    """Builds one kernel, small; -> what is wrong with it."""
    rows, gated, own = kind
    x = torch.zeros(rows, 1024, device="cuda", dtype=torch.bfloat16)
    weight = torch.zeros(2048, 1024, device="cuda", dtype=torch.bfloat16)
    try:
        linear_triton(x, weight, gated=gated, chosen=own)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:90]}"
    return None


def timed(call: Callable[[int], object], calls: int) -> float:
    """us of one of so many calls in a graph; call(n) is the n-th."""
    for n in range(2):
        call(n)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for n in range(calls):
            call(n)
    best = float("inf")
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()  # so that the device has work while the next is launched
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, begin.elapsed_time(end) * 1e3 / calls)
    return best


def measure(name: str, rows: int, weights: torch.Tensor, kinds: Sequence[Kind]) -> str:
    """A line of x [rows, K] by weights [copies, N, K], in every tile of `kinds` that fits."""
    copies, size, inner = weights.shape
    gated = name.endswith("gated")
    x = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16)

    def own(chosen: Tile) -> float:
        def one(n: int) -> object:
            return linear_triton(x, weights[n], gated=gated, chosen=chosen)

        return timed(one, copies)

    def torchs(n: int) -> object:
        found = F.linear(x, weights[n])
        return silu_and_mul_triton(found) if gated else found

    mine = [kind for kind in kinds if kind[:2] == (rounded(rows), gated)]
    found = sorted((own(one), one) for _, _, one in mine if inner % one.block_k == 0)
    chosen = tile(rows, size // (2 if gated else 1), inner, 2, gated)
    best = "  ".join(f"{us:.1f} {tuple(one)}" for us, one in found[:3])
    theirs, ours = timed(torchs, copies), own(chosen)
    return (
        f"{name} rows {rows}: cuBLAS {theirs:.1f}, taken {ours:.1f} {tuple(chosen)}, best {best}, "
        f"{size * inner * 2 / found[0][0] / 1e6:.2f} TB/s"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Times tiles of the engine's own products.")
    parser.add_argument("--rows", default="1,8,16,32,64")
    parser.add_argument("--groups", default=",".join(SHAPES))
    options = parser.parse_args()
    all_rows = [int(n) for n in options.rows.split(",")]
    kinds = list(dict.fromkeys(
        (rounded(rows), gated, own)
        for rows in all_rows for gated in (False, True) for own in candidates(rows, gated)
    ))  # fmt: skip
    cores = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(min(cores, 24), get_context("spawn")) as pool:
        said = zip(kinds, pool.map(build, kinds, chunksize=4), strict=True)
        broken = {kind: wrong for kind, wrong in said if wrong}
    print(f"{len(kinds)} kernels built, {len(broken)} not: {list(broken.items())[:4]}", flush=True)
    kinds = [kind for kind in kinds if kind not in broken]
    for group in options.groups.split(","):
        for place, (size, inner) in enumerate(SHAPES[group]):
            copies = max(CALLS, -(-BYTES // (size * inner * 2)))
            weights = torch.randn(copies, size, inner, device="cuda", dtype=torch.bfloat16)
            name = f"{group} {size}x{inner}{' gated' if place == 2 else ''}"
            for rows in all_rows:
                print(measure(name, rows, weights, kinds), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
