"""Sampled ids on their way to the host, each step's by itself"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

DEPTH = 2
"""Steps whose ids may be on their way at once: one that runs, one enqueued behind it."""


@dataclass(frozen=True, slots=True)
class Pending:
    """Ids [N] of one step on the host, readable once `event` has come; None: now."""

    ids: torch.Tensor
    event: torch.cuda.Event | None

    def wait(self) -> list[int]:
        """Waits for this step alone, whatever is enqueued behind it. Polls: noticing the end of a
        step takes 3 us so, 13 us by synchronising (H200); other threads may run between."""
        while self.event is not None and not self.event.query():
            time.sleep(0)
        ids: list[int] = self.ids.tolist()
        return ids


class Readback:
    """Pinned memory and an event for each of DEPTH steps, used in turn.

    Copying is enqueued right behind the step, since the next one overwrites its ids on the device.
    """

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self._slots: list[tuple[torch.Tensor, torch.cuda.Event]] = []
        if device.type == "cuda":
            self._slots = [
                (torch.zeros(max_num_seqs, dtype=torch.int64).pin_memory(), torch.cuda.Event())
                for _ in range(DEPTH)
            ]
        self._count = 0

    def begin(self, ids: torch.Tensor | None) -> Pending:
        """ids [N] on the device, None where nothing was sampled: then there is the end of the step
        to wait for, before its pinned inputs are written again."""
        if not self._slots:
            return Pending(torch.zeros(0) if ids is None else ids.clone(), None)
        host, event = self._slots[self._count % DEPTH]
        self._count += 1
        host = host[: 0 if ids is None else len(ids)]
        if ids is not None:
            host.copy_(ids, non_blocking=True)
        event.record()
        return Pending(host, event)
