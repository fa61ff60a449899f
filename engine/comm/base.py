"""The communicator that tensor-parallel layers call; observers attach only here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import torch

from engine.comm import ops
from engine.comm.types import Collective, CollectiveObserver, Kind, Site, StepInfo
from engine.kernels import USUAL, Kernels
from engine.kernels.linear import linear


class AddNorm(Protocol):
    """RMSNorm, as reduce_add_norm takes it."""

    @property
    def weight(self) -> torch.Tensor: ...

    @property
    def eps(self) -> float: ...

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, /
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class Communicator(ABC):
    """Sums and gathers among the ranks of one engine.

    Layers call `all_reduce`, `gather`, `linear_all_reduce` and `reduce_add_norm` (its summand made
    by `partial_linear`); a faster form overrides them and changes no layer. Every form issues the
    same collectives in the same order, so counts, sites and observers do not depend on it.

    Attributes:
        rank, world: this rank and the number of ranks.
        path: name of the implementation, recorded with every collective that has no other.
        key: this communicator's number in the operator registry.
    """

    path: str

    def __init__(self, rank: int, world: int, device: torch.device | str = "cpu") -> None:
        self.rank = rank
        self.world = world
        self.key = ops.register(self)
        self._observers: tuple[CollectiveObserver, ...] = ()
        self._step = -1
        self._ordinal = 0
        self._align_buffer = torch.zeros(1, device=device)

    # -- what the layers call ---------------------------------------------------------------------

    def all_reduce(self, x: torch.Tensor, site: Site) -> torch.Tensor:
        """Sums `x` over ranks, in place unless partial_linear made it, and returns the sum; any
        shape, contiguous."""
        torch.ops.rangefinder.all_reduce(x, self.key, int(site))
        return x

    def gather(self, x: torch.Tensor, site: Site) -> torch.Tensor | None:
        """x [N, V/world] of each rank -> [N, V] on rank 0, None on the others."""
        rows, local = x.shape
        is_root = self.rank == 0
        shards = x.new_empty((self.world, rows, local) if is_root else (0,))
        torch.ops.rangefinder.gather(x.contiguous(), shards, self.key, int(site))
        return shards.permute(1, 0, 2).reshape(rows, self.world * local) if is_root else None

    def broadcast(self, x: torch.Tensor, site: Site) -> torch.Tensor:
        """Overwrites `x` with rank 0's values, in place, and returns it."""
        torch.ops.rangefinder.broadcast(x, self.key, int(site))
        return x

    def linear_all_reduce(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        site: Site,
        kernels: Kernels = USUAL,
    ) -> torch.Tensor:
        """x [T, I/world], weight [H, I/world] -> the full [T, H]."""
        return self.all_reduce(self.partial_linear(x, weight, bias, kernels), site)

    def partial_linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        kernels: Kernels = USUAL,
    ) -> torch.Tensor:
        """x [T, I/world], weight [H, I/world] -> this rank's summand [T, H], to be summed before
        the next is made; the bias is added on rank 0 alone, so that the sum holds it once."""
        return linear(x, weight, bias if self.rank == 0 else None, kernels)

    def reduce_add_norm(
        self, partial: torch.Tensor, residual: torch.Tensor, norm: AddNorm, site: Site
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sums partial [T, H] over ranks, then `norm(sum, residual)` -> (normed, new residual)."""
        return norm(self.all_reduce(partial, site), residual)

    # -- observers --------------------------------------------------------------------------------

    def attach(self, observers: Sequence[CollectiveObserver]) -> None:
        """Replaces the observers; an empty sequence detaches all and restores the bare path."""
        self._observers = tuple(observers)

    @property
    def observers(self) -> tuple[CollectiveObserver, ...]:
        return self._observers

    def align(self) -> None:
        """Enqueues one small all-reduce that no observer hears: device work behind it starts
        together on all ranks."""
        self._all_reduce(self._align_buffer)

    def rehearse(self, kind: Kind, nbytes: int, dtype: str) -> Callable[[], None]:
        """-> what enqueues one more collective of this kind and payload (as in Collective.bytes) on
        memory of its own, unheard by observers."""
        item = getattr(torch, dtype)
        local = nbytes // (self.world if kind is Kind.GATHER else 1) // item.itemsize
        x = torch.zeros(local, dtype=item, device=self._align_buffer.device)
        if kind is Kind.GATHER:
            out = x.new_empty((self.world, local) if self.rank == 0 else (0,))
            return lambda: self._gather(x, out)
        return partial(self._all_reduce if kind is Kind.ALL_REDUCE else self._broadcast, x)

    @contextmanager
    def capturing(self, step: StepInfo, observed: bool) -> Iterator[None]:
        """While a CUDA graph is captured: only observers that can be captured hear it, and only if
        it is to be an `observed` graph."""
        attached = self._observers
        chosen = [o for o in attached if o.captures] if observed else []
        self._observers = tuple(chosen)
        self._step, self._ordinal = step.step, 0
        try:
            for observer in chosen:
                observer.capture_begin(step)
            yield
            for observer in reversed(chosen):
                observer.capture_end(step)
        finally:
            self._observers = attached

    def step_begin(self, step: StepInfo) -> None:
        self._step = step.step
        self._ordinal = 0
        for observer in self._observers:
            observer.step_begin(step)

    def step_end(self, step: StepInfo) -> None:
        for observer in reversed(self._observers):
            observer.step_end(step)

    # -- operator bodies --------------------------------------------------------------------------

    def run_all_reduce(self, x: torch.Tensor, site: int) -> None:
        if self._observers:
            self._observed(Kind.ALL_REDUCE, site, x, x.nbytes, lambda: self._all_reduce(x))
        else:
            self._all_reduce(x)

    def run_gather(self, x: torch.Tensor, out: torch.Tensor, site: int) -> None:
        if self._observers:
            nbytes = x.nbytes * self.world
            self._observed(Kind.GATHER, site, x, nbytes, lambda: self._gather(x, out))
        else:
            self._gather(x, out)

    def run_broadcast(self, x: torch.Tensor, site: int) -> None:
        if self._observers:
            self._observed(Kind.BROADCAST, site, x, x.nbytes, lambda: self._broadcast(x))
        else:
            self._broadcast(x)

    def _observed(
        self, kind: Kind, site: int, x: torch.Tensor, nbytes: int, run: Callable[[], None]
    ) -> None:
        dtype = str(x.dtype).removeprefix("torch.")
        collective = Collective(
            self._step,
            self._ordinal,
            kind,
            Site(site),
            nbytes,
            dtype,
            self.world,
            self.rank,
            self._path_of(kind, x),
        )
        self._ordinal += 1
        for observer in self._observers:
            observer.before(collective)
        run()
        for observer in reversed(self._observers):
            observer.after(collective)

    # -- what an implementation provides ----------------------------------------------------------

    def _path_of(self, kind: Kind, x: torch.Tensor) -> str:
        """What runs this collective."""
        return self.path

    @abstractmethod
    def _all_reduce(self, x: torch.Tensor) -> None:
        """Sums x over ranks, in place."""

    @abstractmethod
    def _gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """x [N, V/world] of each rank into rank 0's out [world, N, V/world] (empty elsewhere)."""

    @abstractmethod
    def _broadcast(self, x: torch.Tensor) -> None:
        """Rank 0's x into every rank's x."""

    @abstractmethod
    def barrier(self) -> None:
        """Returns when every rank has called it; not part of the model, so not observed."""

    def close(self) -> None:
        """Leaves the registry; repeatable."""
        ops.unregister(self.key)
        self._observers = ()
