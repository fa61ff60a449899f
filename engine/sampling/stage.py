"""SamplingStage: a step from its logits on rank 0 to its token ids on every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from engine.comm.base import Communicator
from engine.comm.types import Site
from engine.inputs.buffers import SamplingRows
from engine.kernels import runs_triton
from engine.sampling.logprobs import LogprobTensors
from engine.sampling.plan import SamplingPlan, upload
from engine.sampling.step_sampler import StepSampler
from engine.scheduling.step import StepPlan

PROMPT_ROWS = 256
"""Prompt rows that are projected and gathered at once, so that memory stays bounded: their logits
are 156 MB in float32 at V = 151,936."""

Project = Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None]
"""hidden [T, H], rows [R] -> logits [R, V] on rank 0, None on the others; a gather."""


class SamplingStage:
    """One rank's part of sampling: rank 0 alone samples, all of them get the ids.

    Args:
        last_tokens: [slots + 1] where each slot's newest id goes, on every rank.
    """

    def __init__(
        self,
        comm: Communicator,
        last_tokens: torch.Tensor,
        *,
        max_num_seqs: int,
        vocab_size: int,
    ) -> None:
        self._comm = comm
        self._last_tokens = last_tokens
        self._max_num_seqs, self._vocab_size = max_num_seqs, vocab_size
        self._ids = last_tokens.new_zeros(max_num_seqs)
        self._logits: torch.Tensor | None = None  # of replays that stop before sampling
        self._sampler = StepSampler(max_num_seqs, vocab_size, last_tokens.device)

    def __call__(
        self, logits: torch.Tensor | None, rows: SamplingRows, plan: SamplingPlan | None
    ) -> tuple[torch.Tensor, LogprobTensors | None]:
        """logits [N, V] on rank 0, None on the others -> ids [N] everywhere and what rank 0 reports
        of them. Without a plan every row is plain, and a graph can hold the whole."""
        logprobs = None if logits is None else self.sample(logits, rows, plan)
        return self.hand_out(rows), logprobs

    def warm_up(self, rows: SamplingRows) -> None:
        """Loads what samples a float32 copy of logits, as steps with a plan do; no other step runs
        it before the first of those comes."""
        if self._comm.rank == 0 and runs_triton(self._ids):
            logits = torch.zeros(len(rows.slots), self._vocab_size, device=self._ids.device)
            self._sampler.plain(logits, replace(rows, all_greedy=False))

    def sample(
        self, logits: torch.Tensor, rows: SamplingRows, plan: SamplingPlan | None
    ) -> LogprobTensors | None:
        """Rank 0's ids, which `hand_out` takes from here."""
        logprobs = None
        if plan is None:
            ids = self._sampler.plain(logits, rows)
        else:
            ids, logprobs = self._sampler.planned(logits, rows, plan)
        self.ids(len(ids)).copy_(ids)
        return logprobs

    def hand_out(self, rows: SamplingRows) -> torch.Tensor:
        """Rank 0's ids to every rank and into the slots' last tokens; -> ids [N]."""
        ids = self.ids(len(rows.slots))
        self._comm.broadcast(ids, Site.TOKEN_IDS)
        self._last_tokens.index_copy_(0, rows.slots, ids)
        return ids

    def ids(self, count: int) -> torch.Tensor:
        """The first `count` ids of the newest step, which the next overwrites."""
        return self._ids[:count]

    def keep(self, logits: torch.Tensor | None) -> None:
        """Puts rank 0's logits [N, V] into one kept place, so that a graph can end with them."""
        if logits is None:
            return
        if self._logits is None:  # in the run before the first capture
            self._logits = logits.new_zeros(self._max_num_seqs, logits.shape[1])
        self._logits[: len(logits)].copy_(logits)

    def kept(self, count: int) -> torch.Tensor:
        """The first `count` rows of what was kept last."""
        assert self._logits is not None
        return self._logits[:count]

    def prompt_logprobs(
        self, project: Project, hidden: torch.Tensor, plan: StepPlan, sampling: SamplingPlan | None
    ) -> LogprobTensors | None:
        """Of the plan's prompt rows, PROMPT_ROWS at a time; None without any, and on ranks other
        than 0."""
        if not len(plan.prompt_rows):
            return None
        rows = upload(plan.prompt_rows, hidden.device)
        tokens = None if sampling is None else upload(sampling.next_tokens, hidden.device)
        found = []
        for begin in range(0, len(rows), PROMPT_ROWS):
            part = slice(begin, begin + PROMPT_ROWS)
            logits = project(hidden, rows[part])
            if logits is not None:
                assert sampling is not None and tokens is not None
                top = max(sampling.prompt_tops)
                found.append(self._sampler.report(logits, tokens[part], top))
        return LogprobTensors.joined(found) if found else None
