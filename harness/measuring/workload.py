"""What the engine is asked: token ids, lengths and arrival times, all from seeds.

Lengths and arrival times depend on the workload's seed alone, so that points and repeats are
compared on equal requests. Token ids also depend on the point, the pass and the repeat, so that no
repeat finds an earlier one's prefixes in the cache.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.measuring.trace import Trace, read_trace

if TYPE_CHECKING:
    from engine.requests.sampling_params import SamplingParams

NANO_VLLM_VOCAB = 10_000
NANO_VLLM_REQUESTS = 256
PASSES = ("warmup", "plain", "host", "step", "graph_timed", "backlog", "span", "profiler", "nsys",
          "skew")  # fmt: skip


class WorkloadError(ValueError):
    """A workload that this model or engine cannot be asked."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Lengths and times of the requests of one point.

    Attributes:
        prompt_lens, output_lens: tokens of each request.
        arrivals_s: offsets from the begin of the window; None: all at once.
        notes: what a reader must know (shortened requests, wrapped ids); may be empty.
        fixed_batch: sequences that decode together from begin to end; None where that varies.
    """

    kind: str
    prompt_lens: tuple[int, ...]
    output_lens: tuple[int, ...]
    arrivals_s: tuple[float, ...] | None
    temperature: float
    seed: int
    vocab_size: int
    notes: str
    fixed_batch: int | None
    published_ids: tuple[tuple[int, ...], ...] | None = None

    def prompts(self, point_id: str, pass_name: str, repeat: int) -> list[list[int]]:
        """Token ids in [0, vocab_size). nano_vllm's published ids are those of repeat 0 of the
        plain pass; every other repeat has ids of its own at the same lengths."""
        if self.published_ids is not None and (pass_name, repeat) == ("plain", 0):
            return [list(ids) for ids in self.published_ids]
        keys = [self.seed, int(point_id, 16), PASSES.index(pass_name), repeat]
        rng = np.random.default_rng(keys)
        high = (
            self.vocab_size if self.kind != "nano_vllm" else min(NANO_VLLM_VOCAB, self.vocab_size)
        )
        ids = rng.integers(0, high, sum(self.prompt_lens))
        cuts = np.cumsum(self.prompt_lens)[:-1]
        return [part.tolist() for part in np.split(ids, cuts)]

    def params(self) -> list[SamplingParams]:
        """One a request: EOS is ignored, so every request gives exactly what it is asked for."""
        from engine.requests.sampling_params import SamplingParams

        made = {
            n: SamplingParams(temperature=self.temperature, max_tokens=n, ignore_eos=True)
            for n in set(self.output_lens)
        }
        return [made[n] for n in self.output_lens]


def build(cfg: dict[str, Any], *, vocab_size: int, max_model_len: int) -> Workload:
    """The workload of a resolved configuration.

    Raises:
        WorkloadError: an unknown kind, a request longer than the engine takes, an unreadable trace.
    """
    work = cfg["workload"]
    kind = work["kind"]
    ids: tuple[tuple[int, ...], ...] | None = None
    arrivals: tuple[float, ...] | None = None
    notes: list[str] = []
    if kind in ("decode", "prefill"):
        prompt_lens = [int(work["prompt_tokens"])] * cfg["batch"]
        output_lens = [int(work["output_tokens"])] * cfg["batch"]
    elif kind == "nano_vllm":
        drawn, output_lens = nano_vllm(work["num_requests"])
        prompt_lens = [len(p) for p in drawn]
        if vocab_size < NANO_VLLM_VOCAB:
            notes.append(f"ids modulo the vocabulary of {vocab_size}")
        ids = tuple(tuple(i % vocab_size for i in p) for p in drawn)
    elif kind == "trace":
        rows = traced(work)
        prompt_lens, output_lens = list(rows.prompt_tokens), list(rows.output_tokens)
        arrivals = rows.arrivals_s
    else:
        raise WorkloadError(f"workload={kind!r}: choose decode, prefill, nano_vllm or trace")
    if kind in ("nano_vllm", "trace"):
        empty = sum(0 in lens for lens in zip(prompt_lens, output_lens, strict=True))
        if empty:
            notes.append(f"{empty} of {len(prompt_lens)} requests have 1 token where 0 were asked")
        prompt_lens, output_lens, cut = _capped(prompt_lens, output_lens, work, max_model_len)
        if cut:
            notes.append(f"{cut} of {len(prompt_lens)} requests shortened")
            ids = tuple(p[:n] for p, n in zip(ids, prompt_lens, strict=True)) if ids else None
    longest = max(p + o for p, o in zip(prompt_lens, output_lens, strict=True))
    if longest > max_model_len:
        raise WorkloadError(
            f"a request of {longest} tokens: the engine takes {max_model_len}; lower "
            "workload.prompt_tokens or workload.output_tokens, or raise engine.max_model_len"
        )
    return Workload(
        kind=kind,
        prompt_lens=tuple(prompt_lens),
        output_lens=tuple(output_lens),
        arrivals_s=_arrivals(work["arrivals"], arrivals, len(prompt_lens), work["seed"]),
        temperature=float(work["temperature"]),
        seed=int(work["seed"]),
        vocab_size=vocab_size,
        notes="; ".join(notes),
        fixed_batch=cfg["batch"] if kind in ("decode", "prefill") else None,
        published_ids=ids,
    )


def traced(work: dict[str, Any]) -> Trace:
    """The requests of a `workload` section of kind trace.

    Raises:
        WorkloadError, TraceError: no file is named; it cannot be read.
    """
    if work["trace"] is None:
        raise WorkloadError("workload.trace=null: name a CSV of the Azure format")
    return read_trace(Path(work["trace"]), work["num_requests"])


def nano_vllm(num_requests: int | None = None) -> tuple[list[list[int]], list[int]]:
    """nano-vLLM's published benchmark (its bench.py): (prompts as ids, output lengths).

    The whole of it, 256 requests, has 142,827 prompt and 133,966 output tokens; `num_requests`
    takes the first ones of it.
    """
    rng = random.Random(0)
    prompts = [
        [rng.randint(0, NANO_VLLM_VOCAB) for _ in range(rng.randint(100, 1024))]
        for _ in range(NANO_VLLM_REQUESTS)
    ]
    output_lens = [rng.randint(100, 1024) for _ in range(NANO_VLLM_REQUESTS)]
    n = NANO_VLLM_REQUESTS if num_requests is None else num_requests
    if n > NANO_VLLM_REQUESTS:
        raise WorkloadError(
            f"workload.num_requests={n}: nano_vllm has {NANO_VLLM_REQUESTS} requests"
        )
    return prompts[:n], output_lens[:n]


def _capped(
    prompt_lens: Sequence[int], output_lens: Sequence[int], work: dict[str, Any], limit: int
) -> tuple[list[int], list[int], int]:
    """Lengths under the configured caps and the model's length, at least one token each; and how
    many requests were shortened. The prompt gives way last: it leaves room for one token, the
    output takes what is then free."""
    prompts, outputs, cut = [], [], 0
    for prompt, output in zip(prompt_lens, output_lens, strict=True):
        p = max(1, min(prompt, work["prompt_cap"] or prompt, limit - 1))
        o = max(1, min(output, work["max_tokens_cap"] or output, limit - p))
        cut += (p, o) != (max(1, prompt), max(1, output))
        prompts.append(p)
        outputs.append(o)
    return prompts, outputs, cut


def _arrivals(
    how: str, traced: tuple[float, ...] | None, n: int, seed: int
) -> tuple[float, ...] | None:
    from harness.settings.validation import arrival_rate

    rate = arrival_rate(how)
    if rate is not None:
        gaps = np.random.default_rng([seed, 0xA221]).exponential(1 / rate, n)
        return tuple((np.cumsum(gaps) - gaps[0]).tolist())  # the first request comes at 0
    if how == "all":
        return None
    if traced is None:
        raise WorkloadError(f"workload.arrivals={how}: only workload=trace has arrival times")
    return traced
