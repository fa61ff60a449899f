"""StepSampler: raw logits to token ids on rank 0, by whatever their requests ask for."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from engine.inputs.buffers import SamplingRows
from engine.sampling.filters import keep_most_probable
from engine.sampling.logprobs import LogprobTensors
from engine.sampling.penalties import PenaltyState
from engine.sampling.plan import SamplingPlan
from engine.sampling.sampler import Sampler

SLICE_ROWS = 32
"""Rows that are penalised, filtered or ranked at once: what a sort and its int64 neighbours need
for them is some 300 MB at V = 151,936, and four times that for 128 rows."""


class StepSampler:
    """Samples the rows of a step; keeps what penalties need between steps.

    Args:
        num_slots, vocab_size: of the penalties' state, which is made at the first request with one.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._num_slots = num_slots
        self._vocab_size = vocab_size
        self._device = device
        self._sampler = Sampler()
        self._penalties: PenaltyState | None = None

    def plain(self, logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
        """logits [N, V] -> ids [N] by temperature and seed alone: what a graph can hold."""
        if rows.all_greedy:
            return logits.argmax(dim=-1)
        return self._sampler(logits, rows.temperatures, rows.seeds, rows.positions)

    def planned(
        self, raw: torch.Tensor, rows: SamplingRows, plan: SamplingPlan
    ) -> tuple[torch.Tensor, LogprobTensors | None]:
        """raw [N, V], which stay as they are -> ids [N] and what is to be reported of them.

        The order is that of SamplingParams. Only the copy and the race are work for every row.
        """
        given = plan.on(self._device)
        logits = raw.to(torch.float32, copy=True)
        penalised = given["penalty_rows"]
        slots = rows.slots.index_select(0, penalised)
        if len(penalised):
            self._penalise(logits, slots, given)
        places = (given["bias_rows"], given["bias_tokens"])
        if len(places[0]):  # each place once, so the result does not depend on an order of adding
            logits.index_put_(places, given["biases"].float(), accumulate=True)
        places = (given["mask_rows"], given["mask_tokens"])
        if len(places[0]):
            logits.index_put_(places, logits.new_full((), -torch.inf))
        self._filter(logits, rows, given, plan)
        ids = self.plain(logits, rows)
        if len(penalised):
            assert self._penalties is not None
            self._penalties.count(slots, ids.index_select(0, penalised))
        reported = given["logprob_rows"]
        if not len(reported):
            return ids, None
        chosen = ids.index_select(0, reported)
        top = max(plan.logprob_tops)
        return ids, self.report(raw.index_select(0, reported), chosen, top)

    @staticmethod
    def report(logits: torch.Tensor, token_ids: torch.Tensor, top: int) -> LogprobTensors:
        """LogprobTensors of logits [R, V], R > 0, without memory for all rows at once."""
        parts = _slices(len(logits))
        return LogprobTensors.joined(
            [LogprobTensors.of(logits[part], token_ids[part], top) for part in parts]
        )

    def _penalise(
        self, logits: torch.Tensor, slots: torch.Tensor, given: dict[str, torch.Tensor]
    ) -> None:
        if self._penalties is None:
            self._penalties = PenaltyState(self._num_slots, self._vocab_size, self._device)
        if len(given["fresh_slots"]):
            self._penalties.rebuild(
                given["fresh_slots"],
                (given["prompt_slots"], given["prompt_tokens"]),
                (given["output_slots"], given["output_tokens"]),
            )
        rows = given["penalty_rows"]
        for part in _slices(len(rows)):
            chosen = logits.index_select(0, rows[part])
            penalties = [given[name][part] for name in ("repetition", "presence", "frequency")]
            logits.index_copy_(
                0, rows[part], self._penalties.apply(chosen, slots[part], *penalties)
            )

    def _filter(
        self,
        logits: torch.Tensor,
        rows: SamplingRows,
        given: dict[str, torch.Tensor],
        plan: SamplingPlan,
    ) -> None:
        filtered, top_k = given["filter_rows"], plan.arrays["top_k"]
        temperatures = rows.temperatures.index_select(0, filtered)
        for part in _slices(len(filtered)):
            kept = keep_most_probable(
                logits.index_select(0, filtered[part]),
                temperatures[part],
                given["top_k"][part],
                given["top_p"][part],
                given["min_p"][part],
                largest_k=int(top_k[part][-1]),  # they grow
            )
            logits.index_copy_(0, filtered[part], kept)


def _slices(count: int) -> Iterator[slice]:
    for begin in range(0, count, SLICE_ROWS):
        yield slice(begin, min(begin + SLICE_ROWS, count))
