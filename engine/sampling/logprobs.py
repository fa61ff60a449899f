"""Log-probabilities of chosen tokens and of the most probable ones, from raw logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from engine.requests.request import TokenLogprobs


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """TokenLogprobs of R rows while they are on the device.

    Attributes:
        token_ids: [R] int64; logprobs: [R] float32; ranks: [R] int64, from 1.
        top_ids: [R, n] int64; top_logprobs: [R, n] float32; n of the row that asks for most.
    """

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor

    @classmethod
    def of(cls, logits: torch.Tensor, token_ids: torch.Tensor, top: int) -> LogprobTensors:
        """log_softmax in float32 of logits [R, V], any floating dtype, at token_ids [R] and at the
        `top` most probable tokens of each row (all where V is less), lower ids first among equals.
        """
        logits = logits.float()
        vocab_size = logits.shape[1]
        highest = logits.amax(dim=1, keepdim=True)
        log_sum = (logits - highest).exp_().sum(dim=1, keepdim=True).log_()
        chosen = logits.gather(1, token_ids.unsqueeze(1))
        ids = torch.arange(vocab_size, device=logits.device)
        before = (logits > chosen) | ((logits == chosen) & (ids < token_ids.unsqueeze(1)))
        top_ids = (_ordered(logits) - ids).topk(min(top, vocab_size), dim=1).indices
        return cls(
            token_ids=token_ids,
            logprobs=(chosen - highest - log_sum).squeeze(1),
            ranks=before.sum(dim=1) + 1,
            top_ids=top_ids,
            top_logprobs=logits.gather(1, top_ids) - highest - log_sum,
        )

    @classmethod
    def joined(cls, parts: Sequence[LogprobTensors]) -> LogprobTensors:
        """The rows of all parts, which have the same n."""
        return cls(*(torch.cat([getattr(p, name) for p in parts]) for name in cls.__slots__))

    def to_host(self) -> LogprobTensors:
        """On their way to the host, readable once an event recorded behind this has come."""
        return LogprobTensors(*(_to_host(getattr(self, name)) for name in self.__slots__))

    def read(self, tops: Sequence[int]) -> Iterator[TokenLogprobs]:
        """The rows on the host, each with its own number of most probable tokens, tops [R]."""
        columns = (getattr(self, name).tolist() for name in self.__slots__)
        rows = zip(*columns, tops, strict=True)
        for token_id, logprob, rank, top_ids, top_logprobs, top in rows:
            alternatives = zip(top_ids[:top], top_logprobs[:top], strict=True)
            yield TokenLogprobs(token_id, logprob, rank, tuple(alternatives))


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _ordered(logits: torch.Tensor) -> torch.Tensor:
    """float32 -> int64 in the same order, multiples of 2^32, so that a token id can be taken off to
    make all of a row different: which of several equals topk takes is not defined."""
    bits = (logits + 0.0).view(torch.int32)  # -0.0 becomes 0.0, which it equals
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32
