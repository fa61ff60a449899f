"""SamplingPlan: what rank 0 alone must know of a step that is not all plain."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.requests.request import Request
from engine.scheduling.step import ScheduledSeq

_COLUMNS = {
    "filter_rows": np.int64,
    "top_k": np.int64,
    "top_p": np.float64,
    "min_p": np.float64,
    "penalty_rows": np.int64,
    "repetition": np.float64,
    "presence": np.float64,
    "frequency": np.float64,
    "fresh_slots": np.int64,
    "prompt_slots": np.int64,
    "prompt_tokens": np.int64,
    "output_slots": np.int64,
    "output_tokens": np.int64,
    "bias_rows": np.int64,
    "bias_tokens": np.int64,
    "biases": np.float64,
    "mask_rows": np.int64,
    "mask_tokens": np.int64,
    "logprob_rows": np.int64,
}


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """One step. Rows are counted among the N sequences that sample, in the order of the StepPlan.

    Attributes:
        arrays: by name, int64 or float64:
            filter_rows, top_k, top_p, min_p: rows that leave tokens out, by growing top_k, which is
                the vocabulary's size where all tokens may stay.
            penalty_rows, repetition, presence, frequency: rows with penalties.
            fresh_slots: of them those whose state must be rebuilt, since the request has sampled
                nothing in its slot yet; (prompt_slots, prompt_tokens), (output_slots,
                output_tokens): slot and id of each token that these requests hold.
            bias_rows, bias_tokens, biases: what to add where.
            mask_rows, mask_tokens: what may not be sampled.
            logprob_rows: rows whose log-probabilities are wanted.
        logprob_requests: whose these rows are; logprob_tops: how many of the most probable tokens
            to report of each.
        next_tokens: [R] the token behind each of StepPlan.prompt_rows; prompt_tops: R numbers, as
            logprob_tops.
        prompt_requests: whose prompt rows are, with their numbers.
    """

    arrays: dict[str, np.ndarray]
    logprob_requests: list[Request]
    logprob_tops: list[int]
    next_tokens: np.ndarray
    prompt_tops: list[int]
    prompt_requests: list[tuple[Request, int]]

    @classmethod
    def from_schedule(
        cls, seqs: Sequence[ScheduledSeq], vocab_size: int, eos_token_ids: Collection[int]
    ) -> SamplingPlan:
        """Of a step whose StepPlan does not say all."""
        sampling = [seq for seq in seqs if seq.samples]
        special = [(row, seq) for row, seq in enumerate(sampling) if not seq.plain]
        prompts = [seq for seq in seqs if seq.prompt_positions]
        columns: dict[str, list[float]] = {name: [] for name in _COLUMNS}
        _add_filters(columns, special, vocab_size)
        for row, seq in special:
            _add_penalties(columns, row, seq)
            _add_biases(columns, row, seq, eos_token_ids)
        next_tokens: list[int] = []
        for seq in prompts:
            positions = seq.prompt_positions
            next_tokens += seq.request.prompt_ids[positions.start + 1 : positions.stop + 1]
        wanted = [(r, s.request) for r, s in special if s.request.params.logprobs is not None]
        columns["logprob_rows"] += [row for row, _ in wanted]
        return cls(
            arrays={name: np.array(columns[name], dtype) for name, dtype in _COLUMNS.items()},
            logprob_requests=[request for _, request in wanted],
            logprob_tops=[request.params.logprobs or 0 for _, request in wanted],
            next_tokens=np.array(next_tokens, np.int64),
            prompt_tops=[
                seq.request.params.prompt_logprobs or 0
                for seq in prompts
                for _ in seq.prompt_positions
            ],
            prompt_requests=[(seq.request, len(seq.prompt_positions)) for seq in prompts],
        )

    def on(self, device: torch.device) -> dict[str, torch.Tensor]:
        """The arrays on the device, all in one copy that the host does not wait for."""
        whole = upload(np.concatenate([a.view(np.int64) for a in self.arrays.values()]), device)
        parts = whole.split([len(a) for a in self.arrays.values()])
        return {
            name: part.view(torch.float64) if array.dtype == np.float64 else part
            for (name, array), part in zip(self.arrays.items(), parts, strict=True)
        }


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy on the device, through pinned memory on a GPU, so that the host does not wait."""
    host = torch.tensor(array)  # not from_numpy: an array out of a message is read-only
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def _add_filters(
    columns: dict[str, list[float]], special: Sequence[tuple[int, ScheduledSeq]], vocab_size: int
) -> None:
    rows = []
    for row, seq in special:
        params = seq.request.params
        if params.filtered:
            rows.append((min(params.top_k or vocab_size, vocab_size), row, params))
    rows.sort(key=lambda entry: entry[:2])
    columns["filter_rows"] += [row for _, row, _ in rows]
    columns["top_k"] += [k for k, _, _ in rows]
    columns["top_p"] += [params.top_p for _, _, params in rows]
    columns["min_p"] += [params.min_p for _, _, params in rows]


def _add_penalties(columns: dict[str, list[float]], row: int, seq: ScheduledSeq) -> None:
    request, params = seq.request, seq.request.params
    if not params.penalised:
        return
    columns["penalty_rows"].append(row)
    columns["repetition"].append(params.repetition_penalty)
    columns["presence"].append(params.presence_penalty)
    columns["frequency"].append(params.frequency_penalty)
    if seq.token_on_device:
        return
    columns["fresh_slots"].append(request.slot)
    for name, tokens in (("prompt", request.prompt_ids), ("output", request.output_ids)):
        columns[f"{name}_slots"] += [request.slot] * len(tokens)
        columns[f"{name}_tokens"] += tokens


def _add_biases(
    columns: dict[str, list[float]], row: int, seq: ScheduledSeq, eos_token_ids: Collection[int]
) -> None:
    params = seq.request.params
    for token, bias in params.logit_bias:  # type: ignore[misc]
        columns["bias_rows"].append(row)
        columns["bias_tokens"].append(token)
        columns["biases"].append(bias)
    if seq.generated < params.min_tokens:
        ends = params.ends(eos_token_ids)
        columns["mask_rows"] += [row] * len(ends)
        columns["mask_tokens"] += ends
