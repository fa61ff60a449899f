"""A model whose K/V of a position is a digest of the whole prefix up to it.

The digest is computed from the one that it READS at the position before through the request's own
pages, as attention would. A wrong page, a wrong order, an overwritten or a missing position changes
every token after it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from engine.execution.launched import Launched
from engine.requests.request import FinishReason, Request
from engine.requests.sampling_params import SamplingParams
from engine.sampling.plan import SamplingPlan
from engine.scheduling.blocks import BlockPool
from engine.scheduling.scheduler import Schedule
from engine.scheduling.step import StepPlan

VOCAB = 7
EOS = {0}
PRIME = 2**61 - 1


def extend(digest: int, token: int) -> int:
    return (digest * 1_000_003 + token + 1) % PRIME


def sample(digest: int) -> int:
    """The fake model's next token: a function of the whole prefix. Token 0 is EOS."""
    return digest % VOCAB


def digests(token_ids: list[int]) -> list[int]:
    out, digest = [], 0
    for token in token_ids:
        digest = extend(digest, token)
        out.append(digest)
    return out


def spell(token_ids: list[int]) -> str:
    """The fake model's text: a letter a token."""
    return "".join("abcdefg"[token] for token in token_ids)


def reference(
    prompt: list[int], params: SamplingParams, max_model_len: int
) -> tuple[list[int], FinishReason, int | str | None]:
    """What a request alone in an unlimited engine generates, why it ends, and its stop_reason."""
    digest, output = digests(prompt)[-1], []
    while True:
        output.append(sample(digest))
        if output[-1] in EOS and not params.ignore_eos:
            return output, FinishReason.STOP, None
        if output[-1] in params.stop_token_ids:
            return output, FinishReason.STOP, output[-1]
        found = [stop for stop in params.stop if stop in spell(output)]
        if found:
            return output, FinishReason.STOP, found[0]
        if len(output) == params.max_tokens or len(prompt) + len(output) == max_model_len:
            return output, FinishReason.LENGTH, None
        digest = extend(digest, output[-1])


class FakeModel:
    """Executes steps as a rank does: it keeps block tables and last tokens by slot, and has a K/V
    store of one digest for each (page, offset). What it computes follows from the plan alone; the
    schedule behind it is only what the result is checked against."""

    def __init__(self, page_size: int, num_pages: int, max_num_seqs: int) -> None:
        self.page_size = page_size
        self.store: dict[tuple[int, int], int] = {}
        self.block_tables = [[-1] * num_pages for _ in range(max_num_seqs)]
        self.last_tokens = [-1] * max_num_seqs
        self.written: dict[Request, set[int]] = {}  # since the last admission
        self.tokens: dict[Request, list[int]] = {}  # prompt and all that was sampled

    def run(self, plan: StepPlan, schedule: Schedule, pool: BlockPool) -> list[int]:
        for request in schedule.preempted:
            self.written.pop(request, None)
        ids, pages = iter(plan.token_ids.tolist()), iter(plan.pages.tolist())
        sampled = []
        for row, seq in enumerate(schedule.seqs):
            slot, start = int(plan.slots[row]), int(plan.starts[row])
            table = self.block_tables[slot]
            for index in range(plan.page_counts[row]):
                table[plan.page_starts[row] + index] = next(pages)
            stop = start + int(plan.query_lens[row])
            cells = [(table[p // self.page_size], p % self.page_size) for p in range(stop)]
            written = self.written.setdefault(seq.request, set())
            for position in range(start, stop):
                token = next(ids)
                token = self.last_tokens[slot] if token < 0 else token
                before = self.store[cells[position - 1]] if position else 0
                assert pool.references(cells[position][0]) == 1, "a shared page is written"
                assert position not in written, "a position is written twice"
                written.add(position)
                self.store[cells[position]] = extend(before, token)
            # What attention reads is this request's own prefix, reused pages included.
            read = [self.store[cell] for cell in cells]
            tokens = self.tokens.setdefault(seq.request, list(seq.request.prompt_ids))
            booked = seq.request.prompt_ids + seq.request.output_ids
            assert tokens[: len(booked)] == booked, "the host knows other tokens"
            assert read == digests(tokens[:stop])
            if plan.samples[row]:
                assert stop == len(tokens)
                self.last_tokens[slot] = sample(read[-1])
                sampled.append(self.last_tokens[slot])
                tokens.append(self.last_tokens[slot])
        return sampled


class FakeRunner:
    """What EngineCore needs of a runner, around a FakeModel.

    Attributes:
        core: whose steps it runs; to be set before the first.
        before: called with "launch" or "collect" before each; may raise.
    """

    def __init__(self, **config: Any) -> None:
        self.config = SimpleNamespace(model="no such folder", **{"overlap": False, **config})
        self.shape = SimpleNamespace(eos_token_ids=tuple(EOS), vocab_size=VOCAB)
        self.model = FakeModel(config["page_size"], config["num_pages"], config["max_num_seqs"])
        self.core: Any = None
        self.before: Callable[[str], None] = lambda call: None

    def launch(self, plan: StepPlan, sampling: SamplingPlan | None) -> Launched:
        self.before("launch")
        assert sampling is None
        schedule = self.core._scheduler._in_flight[-1]
        message = StepPlan.from_bytes(plan.to_bytes())
        return Launched(torch.tensor(self.model.run(message, schedule, self.core._pool)))

    def collect(self, launched: Launched) -> list[int]:
        self.before("collect")
        assert launched.ids is not None
        return launched.ids.tolist()

    def record_wall(self, step: int, begin_ns: int, end_ns: int) -> None:
        assert begin_ns <= end_ns
