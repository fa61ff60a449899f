"""StepPlan: what the ranks must know of a step, as typed arrays: the message to them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from engine.comm.types import Phase
from engine.config import ResolvedConfig
from engine.requests.request import Request

_DTYPES = {
    # By falling item size, so that every array in the message is aligned.
    "token_ids": np.int64,
    "seeds": np.int64,
    "prompt_rows": np.int64,
    "slots": np.int32,
    "starts": np.int32,
    "query_lens": np.int32,
    "page_starts": np.int32,
    "page_counts": np.int32,
    "pages": np.int32,
    "temperatures": np.float32,
    "samples": np.bool_,
}
_HEADER = struct.Struct(f"<qq{len(_DTYPES)}q")


@dataclass(slots=True)
class ScheduledSeq:
    """One sequence of a step: query tokens at positions start .. start+query_len-1.

    `samples` is True when the last of them is the sequence's last token so far, and
    `token_on_device` when that one was sampled in its slot, by a step that may still be in flight.
    """

    request: Request
    start: int
    query_len: int
    samples: bool
    token_on_device: bool = False

    @property
    def generated(self) -> int:
        """Tokens of output before the one that is sampled after this step."""
        return self.start + self.query_len - len(self.request.prompt_ids)

    @property
    def plain(self) -> bool:
        """Whether temperature and seed say all of how the sequence samples in this step."""
        return not self.samples or self.generated >= self.request.params.plain_from

    @property
    def prompt_positions(self) -> range:
        """Query positions whose logits give prompt log-probabilities that are asked for and not
        there yet: those of the prompt but its last, each of which says what the next token is."""
        request = self.request
        if request.params.prompt_logprobs is None:
            return range(0)
        first = max(self.start, len(request.prompt_logprobs))
        return range(first, min(self.start + self.query_len, len(request.prompt_ids) - 1))


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step, rows in the order of the forward (decoding sequences first). S sequences, T tokens.

    Attributes:
        plain: every sequence that samples is plain in this step (ScheduledSeq.plain). If not, rank
            0 knows more (SamplingPlan), and a decode step's graph is left between logits and ids.
        slots: [S] row of each sequence in the ranks' block tables and last-token buffer.
        starts: [S] first position computed; query_lens: [S] how many.
        samples: [S] whether the sequence samples after this step.
        token_ids: [T] input ids; -1: the last token sampled in that slot, which is on the device.
        page_starts, page_counts: [S] where in its block-table row new pages go, and how many;
            pages: those page ids, concatenated. Only what the ranks do not know yet is sent.
        temperatures: [S] float32, 0 is greedy; seeds: [S].
        prompt_rows: [R] rows of the forward whose logits are wanted besides, for prompt
            log-probabilities.
    """

    step: int
    plain: bool
    token_ids: np.ndarray
    seeds: np.ndarray
    prompt_rows: np.ndarray
    slots: np.ndarray
    starts: np.ndarray
    query_lens: np.ndarray
    page_starts: np.ndarray
    page_counts: np.ndarray
    pages: np.ndarray
    temperatures: np.ndarray
    samples: np.ndarray

    @property
    def num_seqs(self) -> int:
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_decodes(self) -> int:
        """Sequences of one query token that follow at least one computed position, all in front."""
        return int(((self.query_lens == 1) & (self.starts > 0)).cumprod().sum())

    @property
    def phase(self) -> Phase:
        decodes = int((self.token_ids < 0).sum())
        if decodes == self.num_seqs:
            return Phase.DECODE
        return Phase.MIXED if decodes else Phase.PREFILL

    @property
    def says_all(self) -> bool:
        """Whether rank 0 need not know more of the step than the others: it has no SamplingPlan."""
        return self.plain and not len(self.prompt_rows)

    @classmethod
    def from_schedule(cls, step: int, seqs: Sequence[ScheduledSeq]) -> StepPlan:
        """Builds the message and marks the pages in it as sent."""
        token_ids: list[int] = []
        pages: list[int] = []
        page_starts, page_counts = [], []
        prompt_rows: list[int] = []
        plain = True
        for seq in seqs:
            request, params = seq.request, seq.request.params
            if params.plain_from and not seq.plain:  # most requests always are
                plain = False
            if params.prompt_logprobs is not None:
                before = len(token_ids) - seq.start
                prompt_rows.extend(before + position for position in seq.prompt_positions)
            if seq.samples and seq.query_len == 1 and seq.token_on_device:
                token_ids.append(-1)
            else:
                stop = seq.start + seq.query_len
                token_ids.extend(request.token(p) for p in range(seq.start, stop))
            page_starts.append(request.pages_sent)
            page_counts.append(len(request.page_ids) - request.pages_sent)
            pages.extend(request.page_ids[request.pages_sent :])
            request.pages_sent = len(request.page_ids)
        columns = {
            "slots": [s.request.slot for s in seqs],
            "starts": [s.start for s in seqs],
            "query_lens": [s.query_len for s in seqs],
            "samples": [s.samples for s in seqs],
            "token_ids": token_ids,
            "page_starts": page_starts,
            "page_counts": page_counts,
            "pages": pages,
            "temperatures": [s.request.params.temperature for s in seqs],
            "seeds": [s.request.seed for s in seqs],
            "prompt_rows": prompt_rows,
        }
        return cls(step, plain, **{k: np.array(v, dtype=_DTYPES[k]) for k, v in columns.items()})

    @classmethod
    def dummy(cls, config: ResolvedConfig, tokens: int, page: int) -> StepPlan:
        """Prompt chunks of up to `tokens` in all, whose K/V goes to `page` alone: for warm-up and
        for measuring memory. `config` is resolved; no sequence passes max_model_len."""
        limit = config.max_model_len
        tokens = min(tokens, config.max_num_batched_tokens, config.max_num_seqs * limit)
        lens = [min(limit, tokens - done) for done in range(0, tokens, limit)]
        page_counts = [-(-n // config.page_size) for n in lens]
        columns = {
            "slots": range(len(lens)),
            "starts": [0] * len(lens),
            "query_lens": lens,
            "samples": [True] * len(lens),
            "token_ids": [0] * tokens,
            "page_starts": [0] * len(lens),
            "page_counts": page_counts,
            "pages": [page] * sum(page_counts),
            "temperatures": [0.0] * len(lens),
            "seeds": [0] * len(lens),
            "prompt_rows": [],
        }
        return cls(-1, True, **{k: np.array(v, dtype=_DTYPES[k]) for k, v in columns.items()})

    def to_bytes(self) -> bytes:
        """Header of the step number, `plain` and eleven lengths, then the arrays' bytes: bounded by
        the token budget and the cache's size, and free of pickle."""
        arrays = [getattr(self, name) for name in _DTYPES]
        header = _HEADER.pack(self.step, self.plain, *(len(a) for a in arrays))
        return b"".join([header, *(a.tobytes() for a in arrays)])

    @classmethod
    def from_bytes(cls, message: bytes) -> StepPlan:
        if len(message) < _HEADER.size:
            raise ValueError(
                f"step message of {len(message)} bytes: its header alone has {_HEADER.size}"
            )
        step, plain, *lengths = _HEADER.unpack_from(message)
        offset = _HEADER.size
        columns: dict[str, np.ndarray] = {}
        for (name, dtype), length in zip(_DTYPES.items(), lengths, strict=True):
            columns[name] = np.frombuffer(message, dtype=dtype, count=length, offset=offset)
            offset += columns[name].nbytes
        if offset != len(message):
            raise ValueError(f"step message of {len(message)} bytes: its header says {offset}")
        return cls(step, bool(plain), **columns)


assert [f.name for f in fields(StepPlan)][2:] == list(_DTYPES)
