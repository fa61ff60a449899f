"""What is said about a collective: kind, place in the model, size; and who may listen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any


class Kind(IntEnum):
    """The collective operation. `label` is the name that tables and NVTX categories carry."""

    ALL_REDUCE = 0
    GATHER = 1
    BROADCAST = 2

    @property
    def label(self) -> str:
        return self.name.lower()


class Site(IntEnum):
    """Where in the model a collective stands. The layer is not part of it: it follows from the
    ordinal within the step, so that compiled code holds no per-layer constant."""

    EMBED = 0
    ATTN_O_PROJ = 1
    MLP_DOWN_PROJ = 2
    LM_HEAD = 3
    TOKEN_IDS = 4

    @property
    def label(self) -> str:
        return _SITE_LABELS[self]


_SITE_LABELS = {
    Site.EMBED: "embed",
    Site.ATTN_O_PROJ: "attn.o_proj",
    Site.MLP_DOWN_PROJ: "mlp.down_proj",
    Site.LM_HEAD: "lm_head",
    Site.TOKEN_IDS: "token_ids",
}


class Phase(StrEnum):
    """What a step computes: prompt tokens only, one new token per sequence, or both."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


@dataclass(frozen=True, slots=True)
class StepInfo:
    """One engine step as every rank sees it.

    Attributes:
        step: counts from 0 over the life of the engine; equal on all ranks.
        phase: prefill, decode or mixed.
        batch: number of sequences in the step.
        tokens: number of query tokens in the step (padding not counted).
        bucket: rows that the forward ran with; equal to `tokens` without padding.
        samples: number of sequences that sample a token in this step.
        mode: how the forward ran: eager | compiled-layer | compiled-model, with "graph" in front
            ("graph", "graph+compiled-model") if it was the replay of a CUDA graph.
    """

    step: int
    phase: Phase
    batch: int
    tokens: int
    bucket: int
    samples: int
    mode: str

    @property
    def replayed(self) -> bool:
        return self.mode.startswith("graph")


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective on one rank.

    Attributes:
        step, ordinal: the key by which ranks are joined; the ordinal counts from 0 in each step.
        bytes: payload. all_reduce, broadcast: the tensor. gather: the whole result at the root.
        path: the implementation that ran it: gloo, nccl, symm_one_shot, ...
    """

    step: int
    ordinal: int
    kind: Kind
    site: Site
    bytes: int
    dtype: str
    world: int
    rank: int
    path: str


@dataclass(frozen=True, slots=True)
class ObserverContext:
    """What an observer is built with, on its rank.

    Attributes:
        device: "cpu", "cuda:0", ...
        align: enqueues one small all-reduce that no observer hears, so that device work enqueued
            behind it starts together on all ranks; every rank must call it at the same place.
        rehearse: (kind, bytes, dtype) -> what enqueues one more collective of this kind and payload
            on memory of its own, unheard by observers; the same rule holds.
    """

    rank: int
    world: int
    device: str
    align: Callable[[], None]
    rehearse: Callable[[Kind, int, str], Callable[[], None]]


class CollectiveObserver:
    """Listens to a rank's steps and collectives; this base hears nothing.

    Called on the rank, in program order; with several observers `after` and `step_end` run in
    reverse, so that ranges nest. When a CUDA graph is replayed no Python runs inside the step: an
    observer then hears step_begin and step_end alone, unless it `captures`. For one that does, a
    graph of its own is captured with its `before` and `after` inside (they may enqueue device work
    and nothing else), between capture_begin and capture_end; each replay of it repeats that work.

    Attributes:
        captures: whether the observer can be captured.
    """

    captures = False

    def step_begin(self, step: StepInfo) -> None: ...

    def step_end(self, step: StepInfo) -> None: ...

    def before(self, collective: Collective) -> None: ...

    def after(self, collective: Collective) -> None: ...

    def capture_begin(self, step: StepInfo) -> None:
        """What follows is captured for replays of `step.bucket` rows."""

    def capture_end(self, step: StepInfo) -> None: ...

    def result(self) -> Any:
        """What the rank hands over when it is detached; must be picklable."""


# Called in the rank's own process; must be picklable.
ObserverFactory = Callable[[ObserverContext], CollectiveObserver]
