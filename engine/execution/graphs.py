"""CUDA graphs of steps: buckets of rows, static inputs, one replay a step.

The whole step is inside: fetching the last tokens, the forward, the LM head and its gather, the
plain sampler (greedy, temperature, seed), the ids to every rank and into the last-token buffer. So
a step costs the host one copy and one launch. A decode step whose rows ask for more is left between
the logits and the ids: two graphs, the same collectives in the same order, and rank 0 samples
between. Steps with prompts have graphs too, up to the rows where a GPU takes longer than the host
does to launch them (graph_shapes.py); there the last tokens are fetched before the graph.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass

import torch

from engine.comm.base import Communicator
from engine.comm.types import Phase, StepInfo
from engine.graph_shapes import GraphShape, decode_shapes, prompt_shapes, shape_of
from engine.inputs.batch import ForwardBatch
from engine.inputs.buffers import BatchBuffers, SamplingRows
from engine.scheduling.step import StepPlan

Work = Callable[[], object]
Forward = Callable[[ForwardBatch, SamplingRows], object]


@dataclass(frozen=True, slots=True)
class Capture:
    """What capturing one bucket cost.

    Attributes:
        bucket: rows; seconds: warm run and capture; bytes: memory that the device lost to it.
    """

    bucket: int
    seconds: float
    bytes: int


class Recorder:
    """Runs and captures on a stream of its own, into one pool of memory."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, work: Work) -> None:
        """Runs `work` uncaptured and waits for it."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
        torch.cuda.current_stream().wait_stream(self._stream)
        self.synchronize()

    def capture(
        self, parts: Sequence[Work], listening: AbstractContextManager[object]
    ) -> tuple[torch.cuda.CUDAGraph, ...]:
        """A graph for each part. `listening` is entered inside the first and left inside the last:
        what observers enqueue at both ends of a step belongs into the graphs."""
        graphs = tuple(torch.cuda.CUDAGraph() for _ in parts)
        with ExitStack() as stack, torch.cuda.stream(self._stream):
            for graph, part in zip(graphs, parts, strict=True):
                # Not torch.cuda.graph(): it collects garbage and empties the cache at every
                # capture, and there are twenty. thread_local: NCCL's watchdog thread queries events
                # meanwhile, which would otherwise invalidate the capture.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    if graph is graphs[0]:
                        stack.enter_context(listening)
                    part()
                    if graph is graphs[-1]:
                        stack.close()
                finally:
                    graph.capture_end()
        self._stream.synchronize()
        return graphs

    def free_bytes(self) -> int:
        """Memory of the device that nobody holds."""
        return torch.cuda.mem_get_info()[0]

    def synchronize(self) -> None:
        """Waits for the engine's own work. Not for the device: where another engine of the process
        captures on it, that would be an error in both."""
        torch.cuda.current_stream().synchronize()


class StepGraphs:
    """For each shape a graph of the whole step, and for those of decode steps a pair of graphs with
    room to sample between, captured when first used. While observers that can be captured are
    attached, others of both kinds take their place, with the observers inside, captured when first
    used too.

    Args:
        whole: enqueues a step on static inputs, ids included; head: the same as far as its
            logits, which it keeps; tail: from rank 0's ids, which it finds kept, to the end.
        prompt_tokens: rows of the largest step with prompts that has a graph; 0: none has.
        mode: of the forward that is captured.
    """

    def __init__(
        self,
        whole: Forward,
        head: Forward,
        tail: Callable[[SamplingRows], object],
        buffers: BatchBuffers,
        comm: Communicator,
        *,
        max_num_seqs: int,
        max_model_len: int,
        prompt_tokens: int,
        mode: str,
    ) -> None:
        self._whole, self._head, self._tail = whole, head, tail
        self._buffers = buffers
        self._comm = comm
        self._max_model_len = max_model_len
        self.mode = "graph" if mode == "eager" else f"graph+{mode}"
        prompts = prompt_shapes(prompt_tokens, max_num_seqs, max_model_len)
        self._shapes = decode_shapes(max_num_seqs) + prompts
        self._recorder = Recorder()
        # By shape, and whether it is a pair.
        self._clean: dict[tuple[GraphShape, bool], tuple[torch.cuda.CUDAGraph, ...]] = {}
        self._observed: dict[tuple[GraphShape, bool], tuple[torch.cuda.CUDAGraph, ...]] = {}
        self.captures: list[Capture] = []
        self.late_captures: list[Capture] = []
        for shape in reversed(self._shapes):  # the largest first: the others fit into its memory
            self._buffers.fill_padding(shape.rows, shape.prompt_seqs)
            self.captures.append(self._capture(shape, pair=False, observed=False))

    def shape_of(self, plan: StepPlan) -> GraphShape | None:
        """Of the graph that takes the step; None: none does."""
        return shape_of(plan, self._shapes, self._max_model_len)

    def replay(self, shape: GraphShape, between: Work | None = None) -> None:
        """Enqueues a step of this shape on what stands in the buffers; with `between`, which finds
        the logits kept and keeps rank 0's ids, instead of the sampling inside. All ranks take the
        same graphs: the plan says on which side a step is, and observers are attached on all of
        them between the same steps."""
        observed = any(observer.captures for observer in self._comm.observers)
        graphs = self._observed if observed else self._clean
        key = shape, between is not None
        if key not in graphs:
            # The buffers hold this step's inputs; capturing runs the step once to warm up.
            capture = self._capture(*key, observed)
            if not observed:
                self.late_captures.append(capture)
        front, *rest = graphs[key]
        front.replay()
        if between is not None:
            between()
        for graph in rest:
            graph.replay()

    def forget_observed(self) -> None:
        """Drops the graphs that have observers inside."""
        self._observed.clear()

    def close(self) -> None:
        """Frees the graphs; before the communicator goes, since destroying a process group whose
        collectives stand in a living graph hangs (pytorch#115388)."""
        self._recorder.synchronize()
        self._observed.clear()
        self._clean.clear()

    @property
    def num_captures(self) -> int:
        """Without those for observers."""
        return len(self.captures) + len(self.late_captures)

    @property
    def pool_bytes(self) -> int:
        """Memory that the captures took from the device."""
        return sum(capture.bytes for capture in (*self.captures, *self.late_captures))

    def _capture(self, shape: GraphShape, pair: bool, observed: bool) -> Capture:
        begin = time.perf_counter()
        free_before = self._recorder.free_bytes()
        num_rows, seqs, prompts = shape
        phase = Phase.PREFILL if prompts else Phase.DECODE
        info = StepInfo(-1, phase, seqs, num_rows, num_rows, seqs, self.mode)
        limit = self._max_model_len
        # Beside prompts, sequences that decode are chunks of one row to the attention, of unsplit
        # keys: a graph does not know how many there will be.
        meta = (seqs + 1, min(num_rows, limit), limit, 0) if prompts else (seqs, 1, limit, seqs)
        batch, rows = self._buffers.views(num_rows, seqs, meta, all_greedy=False)

        def front() -> None:
            if not prompts:
                self._buffers.fetch_known(batch.input_ids, seqs)
            (self._head if pair else self._whole)(batch, rows)

        parts: list[Work] = [front]
        if pair:
            parts.append(lambda: self._tail(rows))

        def warm() -> None:
            with self._comm.capturing(info, observed=False):
                for part in parts:
                    part()

        # Lazily made things (NCCL connections, cuBLAS workspaces, Triton code) must exist before a
        # capture. The run is unobserved, and in the middle of serving it writes what the replay
        # right after writes again; only the last tokens must be put back between.
        last_tokens = self._buffers.last_tokens.clone()
        self._recorder.run(warm)
        self._buffers.last_tokens.copy_(last_tokens)
        self._recorder.synchronize()
        self._comm.barrier()
        graphs = self._recorder.capture(parts, self._comm.capturing(info, observed))
        (self._observed if observed else self._clean)[shape, pair] = graphs
        taken = free_before - self._recorder.free_bytes()
        return Capture(shape.rows, time.perf_counter() - begin, max(0, taken))
