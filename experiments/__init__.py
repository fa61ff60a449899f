"""One file per question: its summary table, its figure, the claim it tests and where that was made."""
