"""CUDA graphs of decode steps: buckets of rows, static inputs, one replay a step.

The whole step is inside: fetching the last tokens, the forward, the LM head and its gather, the
plain sampler (greedy, temperature, seed), the ids to every rank and into the last-token buffer. So
a step costs the host one copy and one launch.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.batch import ForwardBatch
from engine.buffers import BatchBuffers, SamplingRows
from engine.comm.base import Communicator
from engine.comm.types import Phase, StepInfo

Forward = Callable[[ForwardBatch, SamplingRows], torch.Tensor | None]


def bucket_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Rows that graphs are captured for: 1, 2, 4, 8, every 16th, and always max_num_seqs itself, so
    that no batch size is left without a graph."""
    sizes = {1, 2, 4, 8, *range(16, max_num_seqs + 1, 16), max_num_seqs}
    return tuple(sorted(size for size in sizes if size <= max_num_seqs))


@dataclass(frozen=True, slots=True)
class Capture:
    """What capturing one bucket cost.

    Attributes:
        bucket: rows; seconds: warm run and capture; bytes: memory that the device lost to it.
    """

    bucket: int
    seconds: float
    bytes: int


class DecodeGraphs:
    """A graph for each bucket, and while observers that can be captured are attached, a second one
    with them inside, captured when its bucket is first used.

    Args:
        forward: enqueues a step on static inputs and returns the ids' static buffer.
        mode: of the forward that is captured.
    """

    def __init__(
        self,
        forward: Forward,
        buffers: BatchBuffers,
        comm: Communicator,
        *,
        max_num_seqs: int,
        max_model_len: int,
        mode: str,
    ) -> None:
        self._forward = forward
        self._buffers = buffers
        self._comm = comm
        self._max_model_len = max_model_len
        self.mode = "graph" if mode == "eager" else f"graph+{mode}"
        self.buckets = bucket_sizes(max_num_seqs)
        self.captures: list[Capture] = []
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()
        self._clean: dict[int, torch.cuda.CUDAGraph] = {}
        self._observed: dict[int, torch.cuda.CUDAGraph] = {}
        for bucket in reversed(self.buckets):  # the largest first: the others fit into its memory
            self.captures.append(self._capture(bucket, observed=False))

    def bucket_of(self, num_seqs: int) -> int:
        """The smallest bucket that holds `num_seqs` rows."""
        return self.buckets[bisect.bisect_left(self.buckets, num_seqs)]

    def replay(self, bucket: int) -> None:
        """Enqueues the step of `bucket` rows on what stands in the buffers. All ranks take the same
        graph, because observers are attached on all of them between the same steps."""
        graphs = self._clean
        if any(observer.captures for observer in self._comm.observers):
            graphs = self._observed
            if bucket not in graphs:
                # The buffers hold this step's inputs; capturing runs the step once to warm up.
                self._capture(bucket, observed=True)
        graphs[bucket].replay()

    def forget_observed(self) -> None:
        """Drops the graphs that have observers inside."""
        self._observed.clear()

    def close(self) -> None:
        """Frees the graphs; before the communicator goes, since destroying a process group whose
        collectives stand in a living graph hangs (pytorch#115388)."""
        torch.cuda.synchronize()
        self._observed.clear()
        self._clean.clear()

    @property
    def pool_bytes(self) -> int:
        """Memory that the captures took from the device."""
        return sum(capture.bytes for capture in self.captures)

    def _capture(self, bucket: int, observed: bool) -> Capture:
        begin = time.perf_counter()
        free_before = torch.cuda.mem_get_info()[0]
        info = StepInfo(-1, Phase.DECODE, bucket, bucket, bucket, bucket, self.mode)
        meta = (bucket, 1, self._max_model_len, bucket)
        if not observed:
            self._buffers.fill_padding(bucket)
        batch, rows = self._buffers.views(bucket, bucket, meta, all_greedy=False)

        def step() -> None:
            self._buffers.fetch_known(batch.input_ids, bucket)
            self._forward(batch, rows)

        self._stream.wait_stream(torch.cuda.current_stream())
        # Lazily made things (NCCL connections, cuBLAS workspaces, Triton code) must exist before a
        # capture. The run is unobserved, and in the middle of serving it writes what the replay
        # right after writes again; only the last tokens must be put back between.
        last_tokens = self._buffers.last_tokens.clone()
        with torch.cuda.stream(self._stream), self._comm.capturing(info, observed=False):
            step()
        torch.cuda.current_stream().wait_stream(self._stream)
        self._buffers.last_tokens.copy_(last_tokens)
        torch.cuda.synchronize()
        self._comm.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            # Not torch.cuda.graph(): it collects garbage and empties the cache at every capture,
            # and there are twenty. thread_local: NCCL's watchdog thread queries
            # events meanwhile, which would otherwise invalidate the capture.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                with self._comm.capturing(info, observed):
                    step()
            finally:
                graph.capture_end()
        torch.cuda.synchronize()
        (self._observed if observed else self._clean)[bucket] = graph
        taken = free_before - torch.cuda.mem_get_info()[0]
        return Capture(bucket, time.perf_counter() - begin, max(0, taken))
