"""Triton kernels that cost the host little to launch again.

Triton finds out at every launch which build of a kernel serves its arguments, and a step that no
CUDA graph holds launches 250 kernels. What a build depends on is looked up here by a key made of
the same facts, in half to two thirds of Triton's time (`test_kernel_launch` of
tests/benchmarks/test_host.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from inspect import signature
from typing import Any

import torch
import triton
from triton.runtime import driver
from triton.runtime.jit import JITFunction

_INT32 = range(-(2**31), 2**31)
_ALIGNMENT = 16  # bytes or units; Triton builds other code where a value is no multiple

Launch = Callable[[], None]
_noted: ContextVar[dict[tuple[Any, ...], Launch] | None] = ContextVar("noted", default=None)


@contextmanager
def noting() -> Iterator[dict[tuple[Any, ...], Launch]]:
    """Within it this thread launches nothing, whatever device its tensors are on. What it would
    have launched for the first time is noted, once for each build: a call of the value builds the
    kernel and brings it to the current GPU."""
    noted: dict[tuple[Any, ...], Launch] = {}
    token = _noted.set(noted)
    try:
        yield noted
    finally:
        _noted.reset(token)


class Kernel:
    """A function in Triton's language, launched as `kernel[grid](*arguments, **constants)`:
    tensors, numbers and None by position, `tl.constexpr` and options of the build by name.

    What Triton builds anew is launched by Triton. Hooks of Triton's own launches (Proton's) do not
    see later ones (CUPTI and nsys do), and knobs that are set after the first one change nothing.

    Attributes:
        jit: what Triton makes of the function: the same arguments, the same results.
    """

    def __init__(self, function: Callable[..., None], plain: tuple[str, ...] = ()) -> None:
        self.jit: Any = triton.jit(function, do_not_specialize=plain)
        self._names = tuple(signature(function).parameters)
        self._plain = frozenset(self._names.index(name) for name in plain)
        self._built: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}

    @property
    def num_builds(self) -> int:
        """Kernels that Triton has built or loaded of it in this process, on any device."""
        if not isinstance(self.jit, JITFunction):
            return 0
        return sum(len(cache[0]) for cache in list(self.jit.device_caches.values()))

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        if not isinstance(self.jit, JITFunction):  # Triton interprets
            interpreted: Callable[..., None] = self.jit[grid]
            return interpreted
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], /, *args: Any, **constants: Any) -> None:
        """One launch on the current device's current stream."""
        device = driver.active.get_current_device()
        key = self._key(device, args, constants)
        found = self._built.get(key)
        noted = _noted.get()
        if noted is not None:
            if found is None:
                # Triton's cache, made by this thread: of two that build at once each would make
                # one, and what is in the first is lost.
                _ = self.jit.device_caches[device]
                build = partial(self._build, key, args, constants)
                noted.setdefault((self, *specialized(key)), build)
            return
        if found is None:
            built = self.jit[grid](*args, **constants)
            if built is not None:  # as it is where a hook of Triton's takes the launch
                self._built[key] = built, self._rest(args, constants)
            return
        built, rest = found
        built.run(
            *(*grid, 1, 1)[:3],
            driver.active.get_current_stream(device),
            built.function,
            built.packed_metadata,
            None,  # metadata for the two hooks that follow
            None,
            None,
            *args,
            *rest,
        )

    def _build(
        self,
        key: tuple[Any, ...],
        args: tuple[Any, ...],
        constants: dict[str, Any],
    ) -> None:
        built = self.jit.warmup(*args, grid=(), **constants)
        if built is not None:
            built._init_handles()
            self._built[key] = built, self._rest(args, constants)

    def _rest(self, args: tuple[Any, ...], constants: dict[str, Any]) -> tuple[Any, ...]:
        """The constants among the function's parameters, in their order."""
        return tuple(constants[name] for name in self._names[len(args) :])

    def _key(
        self, device: int, args: tuple[Any, ...], constants: dict[str, Any]
    ) -> tuple[Any, ...]:
        """All that a build depends on, or more."""
        kinds: list[Any] = []
        addresses = 0
        for value in args:
            if isinstance(value, torch.Tensor):
                kinds.append(value.dtype)
                addresses |= value.data_ptr()
            else:
                kinds.append(float if isinstance(value, float) else value)
        for index in self._plain:
            if type(args[index]) is int and args[index] in _INT32:
                kinds[index] = int
        if addresses % _ALIGNMENT:
            kinds += [x.data_ptr() % _ALIGNMENT for x in args if isinstance(x, torch.Tensor)]
        return (device, *kinds, *constants.items())


def specialized(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """A key with integers as Triton tells them apart: one kernel serves all that are equal here."""
    return tuple(
        (kind == 1, kind % _ALIGNMENT == 0, kind in _INT32) if type(kind) is int else kind
        for kind in key
    )


def kernel(*, plain: tuple[str, ...] = ()) -> Callable[[Callable[..., None]], Kernel]:
    """Decorator. plain: integers whose values make no difference to what is built."""
    return partial(Kernel, plain=plain)


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up; triton.cdiv is made for kernels, and takes 2 us on the host."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest that is not below n >= 1; Triton's as its cdiv."""
    return 1 << (n - 1).bit_length()
