"""Penalties: which tokens a request's prompt and output hold, kept on the device by slot."""

from __future__ import annotations

import torch


class PenaltyState:
    """What the penalties of resident requests rest on, updated from sampled ids on the device, so
    that the host need not know a token before the next step is enqueued.

    Rows of a slot hold what its last `rebuild` and the `count`s since then say. int32 counts and
    a flag for each slot and token: 195 MB at 256 slots and V = 151,936.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        size = (num_slots, vocab_size)
        self._counts = torch.zeros(size, dtype=torch.int32, device=device)  # in the output
        self._in_prompt = torch.zeros(size, dtype=torch.bool, device=device)

    def rebuild(
        self,
        slots: torch.Tensor,
        prompt: tuple[torch.Tensor, torch.Tensor],
        output: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Forgets the slots [F] and books the tokens of their new owners: `prompt` and `output` are
        (slot, token id) of each token, both int64."""
        self._counts.index_fill_(0, slots, 0)
        self._in_prompt.index_fill_(0, slots, False)
        self._in_prompt.index_put_(prompt, torch.ones_like(prompt[1], dtype=torch.bool))
        self.count(*output)

    def count(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Books one more of each token [n] in the output of its slot [n]."""
        one = torch.ones_like(tokens, dtype=torch.int32)
        self._counts.index_put_((slots, tokens), one, accumulate=True)

    def apply(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        repetition: torch.Tensor,
        presence: torch.Tensor,
        frequency: torch.Tensor,
    ) -> torch.Tensor:
        """logits [P, V] float32 of the slots [P], penalties [P] float64 -> [P, V] in new memory.

        Repetition as in the CTRL paper with transformers' sign rule: a negative logit is
        multiplied, so that it falls too. Frequency and presence as OpenAI's API documents them.
        """
        counts = self._counts.index_select(0, slots)
        in_output = counts > 0
        seen = in_output | self._in_prompt.index_select(0, slots)
        factor = repetition.float().unsqueeze(1)
        lowered = torch.where(logits < 0, logits * factor, logits / factor)
        penalised = torch.where(seen, lowered, logits)
        penalised -= counts * frequency.float().unsqueeze(1)
        penalised -= in_output * presence.float().unsqueeze(1)
        return penalised
