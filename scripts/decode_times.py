"""Times decode attention by the own kernel against flash-attn 2; on a GPU with flash-attn.

    python scripts/decode_times.py [--heads 16,32] [--kv-heads 8] [--contexts 144,...] [--splits]

A time is that of one call in a CUDA graph of several on different caches, together above 400 MB
where that fits, so that keys and values come from memory and not from L2; the best mean of five
replays, in us. bf16, head_dim 128, pages of 256, block tables for 4,096 tokens or more. The floor
is the time of reading K and V at --read TB/s. --splits: by number of splits instead.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engine.attention import flash, triton_paged
from engine.attention.paged import Paged
from engine.kernels.decode_triton import paged_decode
from harness.tables.console import markdown_table

PAGE, HEAD_DIM, SCALE = 256, 128, 128**-0.5
BYTES, TOKENS = 400 << 20, 600_000
"""Of K and V that the calls of one graph read at least; tokens of one batch at most."""
SPLITS = (1, 2, 4, 8, 16, 32, 64)


class Batch:
    """Sequences of one length, K/V in random pages, in as many caches as calls need."""

    def __init__(self, seqs: int, length: int, heads: int, kv_heads: int) -> None:
        pages = -(-length // PAGE)
        width = max(pages, 4096 // PAGE)
        order = torch.randperm(seqs * pages, generator=torch.Generator().manual_seed(0))
        tables = torch.zeros(seqs, width, dtype=torch.int32)
        tables[:, :pages] = order.view(seqs, pages)
        lens = torch.full((seqs,), length, dtype=torch.int32)
        starts = torch.arange(seqs + 1, dtype=torch.int32)
        rows = [tables, lens, starts, starts * length]  # [S, width], [S], [S + 1], [S + 1]
        meta = torch.tensor([seqs, 1, length, seqs], dtype=torch.int32)
        self.rest = (*(x.cuda() for x in rows), meta)
        self.bytes = seqs * length * kv_heads * HEAD_DIM * 2 * 2
        copies = max(1, min(32, -(-BYTES // self.bytes)))
        shape = (seqs * pages, PAGE, kv_heads, HEAD_DIM)
        options = {"device": "cuda", "dtype": torch.bfloat16}
        self.caches = [[torch.randn(shape, **options) for _ in "kv"] for _ in range(copies)]
        self.q = torch.randn(seqs, heads, HEAD_DIM, **options)

    def timed(self, attend: Callable[..., object]) -> float:
        """us of one call of attend(q, paged)."""
        calls = max(4, min(32, 2 * len(self.caches)))

        def run(count: int) -> None:
            for place in range(count):
                k, v = self.caches[place % len(self.caches)]
                attend(self.q, Paged(k, v, *self.rest))

        run(2)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run(calls)
        graph.replay()
        best = float("inf")
        for _ in range(5):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(3):
                graph.replay()
            end.record()
            torch.cuda.synchronize()
            best = min(best, begin.elapsed_time(end) * 1e3 / 3 / calls)
        return best


def own(splits: int) -> Callable[..., object]:
    """The own kernel; splits 0: as many as the engine takes."""

    def attend(q: torch.Tensor, paged: Paged) -> object:
        out = torch.empty_like(q)
        if splits:
            return paged_decode(q, *paged[:4], out, SCALE, splits)
        return triton_paged.decode(q, paged, out, SCALE)

    return attend


def flash2(q: torch.Tensor, paged: Paged) -> object:
    return flash.decode(q, paged, SCALE)


def main() -> int:
    parser = argparse.ArgumentParser(description="Decode attention: own kernel and flash-attn 2.")
    parser.add_argument("--heads", default="16,32")
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--contexts", default="144,256,512,1024,2048,8192")
    parser.add_argument("--batches", default="1,2,4,8,16,32,64,128,256")
    parser.add_argument("--read", type=float, default=4.16, help="TB/s that the GPU reads")
    parser.add_argument("--splits", action="store_true")
    options = parser.parse_args()
    lists = (options.heads, options.contexts, options.batches)
    all_heads, contexts, batches = ([int(n) for n in text.split(",")] for text in lists)
    tried = [own(n) for n in SPLITS] if options.splits else [own(0), flash2]
    names = [f"{n} splits" for n in SPLITS] if options.splits else ["own us", "flash2 us"]
    lines = []
    for heads in all_heads:
        for length in contexts:
            for seqs in (n for n in batches if n * length <= TOKENS):
                batch = Batch(seqs, length, heads, options.kv_heads)
                times = [f"{batch.timed(attend):.1f}" for attend in tried]
                floor = batch.bytes / options.read / 1e6
                taken = triton_paged.num_splits(seqs, options.kv_heads)
                shape = f"{heads}/{options.kv_heads}"
                lines.append([shape, str(length), str(seqs), *times, f"{floor:.1f}", str(taken)])
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    headings = ["q/kv heads", "keys", "sequences", *names, "floor us", "splits taken"]
    print(markdown_table(headings, lines))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
