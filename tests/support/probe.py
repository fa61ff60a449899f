"""A rank without a scheduler: steps given by hand, logits of every step kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from engine.comm.base import Communicator
from engine.comm.solo import SoloCommunicator
from engine.config import EngineConfig
from engine.execution.runner import Runner
from engine.models.qwen import Qwen3ForCausalLM
from engine.resolve import resolve
from engine.scheduling.step import StepPlan
from engine.shape import ModelShape


class Probe:
    """Feeds token sequences to a Runner, each sequence with a slot and scattered pages of its own.

    Logits are copied into a static buffer behind compute_logits, a copy that a captured graph
    repeats, so that they can be read after a replay as after an eager step.
    """

    def __init__(self, path: Path, comm: Communicator | None = None, **options: Any) -> None:
        options = {"max_num_seqs": 8, "max_model_len": 1024, "num_pages": 64, **options}
        config = EngineConfig(model=str(path), **options)
        shape = ModelShape.from_hf(path)
        self.config = resolve(config, shape)
        kept: dict[str, torch.Tensor] = {}
        plain = Qwen3ForCausalLM.compute_logits

        def keeping(model: Qwen3ForCausalLM, hidden: torch.Tensor, batch: Any) -> Any:
            logits = plain(model, hidden, batch)
            if logits is not None and not logits.is_meta:  # as those of prebuilding are
                if "logits" not in kept:
                    kept["logits"] = logits.new_zeros(self.config.max_num_seqs, logits.shape[1])
                kept["logits"][: len(logits)].copy_(logits)
            return logits

        self._patch = mock.patch.object(Qwen3ForCausalLM, "compute_logits", keeping)
        with self._patch:
            self.runner = Runner(
                self.config,
                shape,
                comm or SoloCommunicator(),
                getattr(comm, "min_over_ranks", lambda n: n),
            )
        self._kept = kept
        self._steps = 0
        self._pages: dict[int, list[int]] = {}
        assert self.config.num_pages is not None
        free = np.random.default_rng(0).permutation(self.config.num_pages)
        self._free = [int(page) for page in free]

    def step(self, rows: Sequence[tuple[int, int, Sequence[int]]]) -> torch.Tensor | None:
        """One step of (slot, start, token ids); decoding rows first. Every row samples.

        Rows of one token behind a computed position are given as known on the device, as the engine
        does, so that a runner with graphs replays. Returns float32 logits [rows, V] on rank 0.
        """
        decodes = all(len(ids) == 1 and start > 0 for _, start, ids in rows)
        size = self.config.page_size
        starts, counts, pages = [], [], []
        for slot, start, ids in rows:
            own = self._pages.setdefault(slot, [])
            starts.append(len(own))
            needed = -(-(start + len(ids)) // size) - len(own)
            own += [self._free.pop() for _ in range(needed)]
            counts.append(needed)
            pages += own[len(own) - needed :] if needed else []
        if decodes:
            for slot, _, ids in rows:
                self.runner._buffers.last_tokens[slot] = ids[0]
        tokens = [-1 if decodes else token for _, _, ids in rows for token in ids]
        plan = StepPlan(
            self._steps,
            plain=True,
            token_ids=np.array(tokens, np.int64),
            seeds=np.zeros(len(rows), np.int64),
            slots=np.array([slot for slot, _, _ in rows], np.int32),
            starts=np.array([start for _, start, _ in rows], np.int32),
            query_lens=np.array([len(ids) for _, _, ids in rows], np.int32),
            page_starts=np.array(starts, np.int32),
            page_counts=np.array(counts, np.int32),
            pages=np.array(pages, np.int32),
            temperatures=np.zeros(len(rows), np.float32),
            samples=np.ones(len(rows), np.bool_),
            prompt_rows=np.zeros(0, np.int64),
        )
        self._steps += 1
        with self._patch:
            launched = self.runner.launch(plan)
            if self.runner.comm.rank == 0:
                self.runner.collect(launched)
            else:  # nobody sends it plans, whose coming says that pinned inputs are free again
                self.runner.synchronize()
        if "logits" not in self._kept:
            return None
        return self._kept["logits"][: len(rows)].float().clone()

    def teacher_forced(
        self, sequences: Sequence[Sequence[int]], prompt: int
    ) -> torch.Tensor | None:
        """Prefills the first `prompt` tokens of each sequence in one step, then feeds the rest
        one by one; float32 logits [sequences, steps, V], the last prompt token's first."""
        found = [self.step([(i, 0, ids[:prompt]) for i, ids in enumerate(sequences)])]
        for position in range(prompt, len(sequences[0])):
            rows = [(i, position, ids[position : position + 1]) for i, ids in enumerate(sequences)]
            found.append(self.step(rows))
        if found[0] is None:
            return None
        return torch.stack([f for f in found if f is not None], dim=1)

    @torch.inference_mode()
    def poison(self) -> None:
        """NaN into every page, the dummy page included, and into the kept logits."""
        for cache in self.runner.kv_cache.layers:
            for tensor in cache:
                tensor.fill_(float("nan"))
        self._kept["logits"].fill_(float("nan"))

    def close(self) -> None:
        self.runner.close()
