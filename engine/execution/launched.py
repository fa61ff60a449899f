"""Launched: what an enqueued step leaves on the device, and for whom."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

import torch

from engine.inputs.readback import Pending, Readback
from engine.sampling.logprobs import LogprobTensors
from engine.sampling.plan import SamplingPlan


@dataclass(frozen=True, slots=True)
class Launched:
    """A step that need not be complete before its ids are read.

    Attributes:
        ids: [N] int64, of the sequences that sample; None if none does. The next step overwrites
            them; `pending`: the same on their way to rank 0's host, None on other ranks.
        plan: rank 0's, None on other ranks and where it has nothing to say.
        logprobs: of the plan's logprob_rows; prompt_logprobs: of the step's prompt rows; both None
            where there are no such rows, and on other ranks.
    """

    ids: torch.Tensor | None
    plan: SamplingPlan | None = None
    logprobs: LogprobTensors | None = None
    prompt_logprobs: LogprobTensors | None = None
    pending: Pending | None = None

    def on_its_way(self, readback: Readback) -> Launched:
        """With everything that rank 0 reads enqueued behind the step, so that reading it waits for
        no later one."""
        logprobs, prompt = self.logprobs, self.prompt_logprobs
        return Launched(
            self.ids,
            self.plan,
            None if logprobs is None else logprobs.to_host(),
            None if prompt is None else prompt.to_host(),
            readback.begin(self.ids),
        )

    def keep_logprobs(self) -> None:
        """Hands the log-probabilities to their requests, once the ids have been booked: a request
        that ended meanwhile (aborted, or a token too many) got no token and gets no entry."""
        plan = self.plan
        if plan is None:
            return
        if self.logprobs is not None:
            entries = self.logprobs.read(plan.logprob_tops)
            for request, entry in zip(plan.logprob_requests, entries, strict=True):
                if len(request.logprobs) < len(request.output_ids):
                    request.logprobs.append(entry)
        if self.prompt_logprobs is not None:
            entries = self.prompt_logprobs.read(plan.prompt_tops)
            for request, count in plan.prompt_requests:
                request.prompt_logprobs.extend(islice(entries, count))
