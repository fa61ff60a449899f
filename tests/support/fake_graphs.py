"""CUDA graphs without CUDA: a capture runs its parts for observers, a replay runs them again."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from engine import EngineConfig, ModelShape
from engine.comm.base import Communicator
from engine.comm.types import Phase, StepInfo
from engine.core import EngineCore
from engine.execution.graphs import Work
from engine.execution.runner import Runner
from engine.requests.request import Request
from engine.resolve import resolve
from engine.scheduling.step import StepPlan


class FakeGraph:
    def __init__(self, recorder: FakeRecorder, part: Work) -> None:
        self._recorder, self._part = recorder, part

    def replay(self) -> None:
        comm = self._recorder.comm
        assert comm is not None
        self._recorder.replays += 1
        with comm.capturing(StepInfo(-1, Phase.DECODE, 0, 0, 0, 0, "graph"), observed=False):
            self._part()


class FakeRecorder:
    """In the place of engine.execution.graphs.Recorder. A capture changes nothing on a device, so
    what it writes here is taken back.

    Attributes to set before the first replay: `comm`, `last_tokens` (BatchBuffers.last_tokens).
    """

    def __init__(self) -> None:
        self.comm: Communicator | None = None
        self.last_tokens = torch.empty(0)
        self.captured: list[int] = []  # parts of each capture
        self.replays = 0

    def run(self, work: Work) -> None:
        work()

    def capture(
        self, parts: Sequence[Work], listening: AbstractContextManager[object]
    ) -> tuple[FakeGraph, ...]:
        before = self.last_tokens.clone()
        with listening:
            for part in parts:
                part()
        self.last_tokens.copy_(before)
        self.captured.append(len(parts))
        return tuple(FakeGraph(self, part) for part in parts)

    def free_bytes(self) -> int:
        return 0

    def synchronize(self) -> None: ...


class GraphRank:
    """One rank of an engine that replays fake graphs, driven by hand;
    engine.execution.graphs.Recorder must be FakeRecorder meanwhile.

    Args:
        pipe: steps of rank 0 for the other rank; not used at a world of one.
        prompt_tokens: rows of the largest step with prompts that has a graph.
    """

    def __init__(
        self,
        path: Path,
        comm: Communicator,
        pipe: queue.Queue[bytes | None],
        prompt_tokens: int = 0,
        **options: Any,
    ) -> None:
        config = EngineConfig(
            model=str(path), tp=comm.world, enforce_eager=True, device="cpu", **options
        )
        shape = ModelShape.from_hf(path)
        self.comm, self._pipe = comm, pipe
        self.runner = Runner(resolve(config, shape), shape, comm)
        # On a CPU nothing is captured, and resolving has said so.
        self.runner.config = replace(self.runner.config, graph_prompt_tokens=prompt_tokens)
        graphs = self.runner._capture()
        self.recorder: FakeRecorder = graphs._recorder  # type: ignore[assignment]
        self.recorder.comm, self.recorder.last_tokens = comm, self.runner._buffers.last_tokens
        self.runner._graphs = graphs

    def serve(self, requests: Callable[[], Sequence[Request]]) -> list[Request]:
        """Rank 0: every request to its end, in the order given; other ranks: until it is done."""
        if self.comm.rank:
            while (message := self._pipe.get()) is not None:
                self.runner.launch(StepPlan.from_bytes(message))
            return []
        core = EngineCore(self.runner, lambda plan: self._pipe.put(plan.to_bytes()))
        given = requests()
        for request in given:
            core.add(request)
        while core.has_work:
            core.step()
        self._pipe.put(None)
        return list(given)
