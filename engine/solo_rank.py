"""The caller's side of tp=1: the one rank runs in the caller's own process and thread."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from engine.comm.solo import SoloCommunicator
from engine.config import ResolvedConfig
from engine.core import EngineCore
from engine.messages import Control
from engine.rank import Rank
from engine.request import Request
from engine.runner import Runner
from engine.shape import ModelShape

_CACHE_VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


class SoloRank:
    """Same methods as group.RankGroup. The process's thread count and compile-cache folders are set
    for the life of the engine and restored by close()."""

    def __init__(self, config: ResolvedConfig, shape: ModelShape) -> None:
        begin = time.perf_counter()
        self._threads = torch.get_num_threads()
        self._environment = {name: os.environ.get(name) for name in _CACHE_VARIABLES}
        if config.device == "cpu":
            torch.set_num_threads(config.threads_per_rank)
        self._runner: Runner | None = None
        comm = SoloCommunicator()
        try:
            self._runner = Runner(config, shape, comm)
        finally:
            if self._runner is None:
                comm.close()
                self._restore()
        self._core = EngineCore(self._runner)
        self._rank = Rank(self._runner, self._core)
        self.effective = self._runner.effective
        total = time.perf_counter() - begin
        self.startup = {**self._runner.startup, "spawn_s": None, "total_s": total}

    def _check(self) -> None:
        if self._runner is None:
            raise RuntimeError("the engine is closed")

    def submit(self, requests: list[Request]) -> None:
        self._check()
        for request in requests:
            self._core.add(request)

    def abort(self, request_id: str) -> None:
        self._check()
        self._core.abort(request_id)

    def poll(self, timeout_s: float | None) -> list[Request]:
        """Runs steps until a request ends or `timeout_s` has passed; sleeps if there is no work."""
        self._check()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self._core.has_work:
            finished = self._core.step()
            if finished or (deadline is not None and time.monotonic() >= deadline):
                return finished
        if deadline is not None:
            time.sleep(max(0.0, deadline - time.monotonic()))
        return []

    def control(self, message: Control) -> list[Any]:
        self._check()
        return [self._rank.handle(message)]

    def close(self) -> None:
        """Frees the model; repeatable."""
        if self._runner is not None:
            self._runner.close()
            self._runner = None
            self._restore()

    def _restore(self) -> None:
        torch.set_num_threads(self._threads)
        for name, value in self._environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
