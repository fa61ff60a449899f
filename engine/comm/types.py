"""What is said about a collective: its kind, place in the model and size; and who may listen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any, Protocol


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
        mode: how the forward ran: eager | compiled-layer | compiled-model | graph | ...
    """

    step: int
    phase: Phase
    batch: int
    tokens: int
    bucket: int
    samples: int
    mode: str


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


class CollectiveObserver(Protocol):
    """Listens to a rank's steps and collectives. Called on the rank, in program order; with several
    observers `after` and `step_end` run in reverse, so that ranges nest."""

    def step_begin(self, step: StepInfo) -> None: ...

    def step_end(self, step: StepInfo) -> None: ...

    def before(self, collective: Collective) -> None: ...

    def after(self, collective: Collective) -> None: ...

    def result(self) -> Any:
        """What the rank hands over when it is detached; must be picklable."""
        ...


# Called as factory(rank, world, device) in the rank's own process; must be picklable.
ObserverFactory = Callable[[int, int, str], CollectiveObserver]
