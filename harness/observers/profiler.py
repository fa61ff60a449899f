"""torch.profiler over a few decode steps: what CUPTI says of the communication kernels."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.comm.types import CollectiveObserver, ObserverContext, Phase, StepInfo
from harness.records import PHASE_CODES, STEP_DTYPE, Names, ProfileRecord, Rows

SKIPPED, PROFILED = 4, 12  # decode steps before the profile and in it
KERNEL = "ncclDevKernel"


class ProfilerObserver(CollectiveObserver):
    """Profiles PROFILED decode steps after SKIPPED ones. It is not captured: replayed steps are
    those of the clean graph. All ranks begin and end at the same steps; the first profiled one
    holds the wait for the slowest rank's profiler and is for the reader to leave out.

    Args:
        profile: makes a torch.profiler.profile, or a stand-in.
    """

    def __init__(self, context: ObserverContext, profile: Any = None) -> None:
        self._rank, self._world = context.rank, context.world
        self._make = profile or _cuda_profile
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

    def step_end(self, step: StepInfo) -> None:
        if self._active and self._steps.count == PROFILED:
            self._stop()

    def result(self) -> ProfileRecord:
        if self._active:
            self._stop()
        kernels = [] if self._profile is None else communication_kernels(self._profile)
        error = None
        if self._profile is None:
            error = f"the window has no more than {SKIPPED} decode steps"
        elif not kernels:
            error = f"CUPTI reported no kernel named {KERNEL}*"
        return ProfileRecord(
            rank=self._rank,
            world=self._world,
            steps=self._steps.taken(),
            modes=self._modes.tuple(),
            names=[name for name, _, _ in kernels],
            begin_ns=np.array([begin for _, begin, _ in kernels], np.int64),
            duration_ns=np.array([ns for _, _, ns in kernels], np.int64),
            error=error,
        )

    def _stop(self) -> None:
        self._active = False
        self._profile.stop()


def _cuda_profile() -> Any:
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


def communication_kernels(profile: Any) -> list[tuple[str, int, int]]:
    """(name, begin ns, duration ns) of the communication kernels, by begin."""
    found = [kernel for kernel in profile.kernels() if kernel[0].startswith(KERNEL)]
    return sorted(found, key=lambda kernel: kernel[1])
