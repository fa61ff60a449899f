"""From logits to token ids: filters, penalties, log-probabilities, noise by counters."""
