"""One file per question: its summary table, its figure, the claim it tests and its source."""
