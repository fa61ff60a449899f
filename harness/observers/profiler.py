"""torch.profiler over a few decode steps: what CUPTI says of their kernels."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import numpy as np

from engine.comm.types import CollectiveObserver, ObserverContext, Phase, StepInfo
from harness.observers.kernels import COMMUNICATION, communicates, split
from harness.observers.records import (
    PHASE_CODES,
    SPLIT_DTYPE,
    STEP_DTYPE,
    Names,
    ProfileRecord,
    Rows,
)

SKIPPED, PROFILED = 4, 12  # decode steps before the profile and in it
MARK = "_nothing"
"""Name of the kernel that stands before and after each profiled step, so that CUPTI's kernels can
be told apart by step: a replay's are launched by no call of their own."""
COPIES = ("Memcpy", "Memset")
Kernel = tuple[str, int, int]
"""(name, begin ns, duration ns)"""


class ProfilerObserver(CollectiveObserver):
    """Profiles PROFILED decode steps after SKIPPED ones. It is not captured: replayed steps are
    those of the clean graph. All ranks begin and end at the same steps; the first profiled one
    holds the wait for the slowest rank's profiler and is for the reader to leave out.

    Args:
        profile: makes a torch.profiler.profile, or a stand-in.
        mark: enqueues a kernel named MARK.
    """

    def __init__(
        self,
        context: ObserverContext,
        profile: Any = None,
        mark: Callable[[], None] | None = None,
    ) -> None:
        self._rank, self._world = context.rank, context.world
        self._make = profile or cuda_profile
        self._mark = mark or _cuda_mark(context.device)
        self._profile: Any = None
        self._active = False
        self._seen = 0
        self._steps, self._modes = Rows(STEP_DTYPE, 64), Names()

    def step_begin(self, step: StepInfo) -> None:
        if step.phase is not Phase.DECODE:
            return
        if self._seen == SKIPPED:
            self._profile = self._make()
            self._profile.start()
            self._active = True
        self._seen += 1
        if self._active:
            code = PHASE_CODES[step.phase]
            mode = self._modes.code(step.mode)
            self._steps.append(
                (step.step, code, step.batch, step.tokens, step.bucket, step.samples, mode, 0, 0)
            )
            self._mark()

    def step_end(self, step: StepInfo) -> None:
        if not self._active:
            return
        self._mark()
        if self._steps.count == PROFILED:
            self._stop()

    def result(self) -> ProfileRecord:
        if self._active:
            self._stop()
        kernels = (
            [] if self._profile is None else sorted(self._profile.kernels(), key=itemgetter(1))
        )
        calls = [kernel for kernel in kernels if communicates(kernel[0])]
        steps, modes = self._steps.taken(), self._modes.tuple()
        splits = _splits(kernels, [modes[mode].startswith("graph") for mode in steps["mode"]])
        error = None
        if self._profile is None:
            error = f"the window has no more than {SKIPPED} decode steps"
        elif splits is None:
            marks = sum(name.startswith(MARK) for name, _, _ in kernels)
            error = f"CUPTI reported {marks} kernels {MARK} round {len(steps)} steps"
        elif self._world > 1 and not calls:
            error = f"CUPTI reported no kernel named {', '.join(COMMUNICATION)}"
        return ProfileRecord(
            rank=self._rank,
            world=self._world,
            steps=steps,
            modes=modes,
            names=[name for name, _, _ in calls],
            begin_ns=np.array([begin for _, begin, _ in calls], np.int64),
            duration_ns=np.array([ns for _, _, ns in calls], np.int64),
            splits=np.zeros(0, SPLIT_DTYPE) if splits is None else splits,
            error=error,
        )

    def _stop(self) -> None:
        self._active = False
        self._profile.stop()


def cuda_profile() -> Any:
    """A profile by CUPTI: start(), stop(), and kernels() -> list[Kernel]."""
    import torch
    from torch.autograd import DeviceType

    class Profile:
        """Waits for the GPU before it starts and stops: its kernels are of the steps between."""

        def __init__(self) -> None:
            kinds = [torch.profiler.ProfilerActivity.CUDA]
            self._profile = torch.profiler.profile(activities=kinds)

        def start(self) -> None:
            torch.cuda.synchronize()
            self._profile.start()

        def stop(self) -> None:
            torch.cuda.synchronize()
            self._profile.stop()

        def kernels(self) -> list[tuple[str, int, int]]:
            results: Any = self._profile.profiler
            return [
                (event.name(), event.start_ns(), event.duration_ns())
                for event in results.kineto_results.events()
                if event.device_type() == DeviceType.CUDA
            ]

    return Profile()


def _cuda_mark(device: str) -> Callable[[], None]:
    from harness.observers.stamp_kernels import Nothing

    return Nothing(device)


def _splits(kernels: list[Kernel], replayed: list[bool]) -> np.ndarray | None:
    """[S] SPLIT_DTYPE of the kernels that begin between the marks 0 and 1, 2 and 3, ..., by begin;
    None where there are not two marks a step.

    A replayed step is its graph, as its stamps have it: copies before and after it, of which some
    20 us of launching the graph keep the first apart, are left out.
    """
    marks = [place for place, kernel in enumerate(kernels) if kernel[0].startswith(MARK)]
    if len(marks) != 2 * len(replayed):
        return None
    found = np.zeros(len(replayed), SPLIT_DTYPE)
    for step, (first, last) in enumerate(zip(marks[::2], marks[1::2], strict=True)):
        own = kernels[first + 1 : last]
        while replayed[step] and own and own[0][0].startswith(COPIES):
            own = own[1:]
        while replayed[step] and own and own[-1][0].startswith(COPIES):
            own = own[:-1]
        begin = np.array([kernel[1] for kernel in own], np.int64)
        end = begin + np.array([kernel[2] for kernel in own], np.int64)
        found[step] = split(begin, end, np.array([communicates(k[0]) for k in own], bool))
    return found
